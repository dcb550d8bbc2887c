"""Contradictions between keys of an experiment, which no single section can find."""

from collections.abc import Iterator

from pipeline.config import finetuning, keys, lightning_module
from pipeline.config.named_optimizers import own_key
from pipeline.config.parallel import Parallel
from pipeline.config.reported import name_problems, source_of
from pipeline.config.sample_order import KINDS
from pipeline.config.schema import Experiment, followed
from pipeline.config.sweep import misused
from pipeline.errors import Problem
from pipeline.wording import counted, did_you_mean

OWN_TAGS = frozenset(
    (
        *("role", "strategy", "launcher", "world_size", "device", "devices", "cpus_per_worker", "config_hash"),
        *("hardware", "user", "python", "git_commit", "git_dirty", "sweep", "speedup", "error", "trials", "best"),
        *("best_run", "best_run_id", "best_step", "best_metric", "best_value", "stopped_early"),
        *("evaluated", "evaluated_changes"),
    )
)
"""Names of tags that runs in MLflow get in any case."""
_RESERVED = ("mlflow.", "pipeline.", "best.", "changed.")


def contradictions(experiment: Experiment) -> Iterator[Problem]:
    """Find all keys that contradict each other."""
    train, parallel = experiment.train, experiment.parallel
    if experiment.loss is None and experiment.task is None:
        yield Problem("loss", "missing; write a loss, or a task that computes it")
    if experiment.loss is not None and experiment.task is not None:
        yield Problem("loss", "both loss and task are given; a task brings its own loss, remove one")
    if train.epochs is None and train.steps is None:
        yield Problem("train.epochs", "missing; write the passes over the training set, or train.steps")
    if train.epochs is not None and train.steps is not None:
        yield Problem("train.steps", "both epochs and steps are given; remove one (train.epochs=null in an override)")
    yield from _batch_sizes(experiment)
    if parallel.is_elastic and not experiment.checkpoint.keep:
        yield Problem(
            "parallel.workers",
            f"is {list(parallel.worker_counts)}, but checkpoint.keep is 0, and training resumes from a checkpoint "
            "when the number of workers changes; write one number, or checkpoint.keep: 1",
        )
    yield from name_problems(experiment.metrics)
    for key, metric in followed(experiment).items():
        if source_of(metric, experiment.metrics) is None and _is_lightning(experiment):
            options = experiment.checkpoint if key == "checkpoint.best" else train.early_stopping
            if options is not None and options.mode == "auto":
                message = f"is {metric}, a log of the module, of which nobody knows whether larger or smaller is better"
                yield Problem(key, f"{message}; write {key.rpartition('.')[0]}.mode: max, or min")
        elif source_of(metric, experiment.metrics) is None:
            known = ", ".join(f"validation/{name}" for name in ("loss", *experiment.metrics))
            yield Problem(key, f"is {metric}, which isn't measured; choose one of {known}")
    if experiment.checkpoint.best is not None and not experiment.checkpoint.keep:
        yield Problem("checkpoint.best", "needs a checkpoint, but checkpoint.keep is 0; write checkpoint.keep: 1")
    if experiment.tracking.register_model is not None and not experiment.tracking.log_model:
        message = "registers a logged model, but tracking.log_model is false; write true, or remove this key"
        yield Problem("tracking.register_model", message)
    yield from _taken_tags(experiment)
    for key, message in finetuning.misused(train.start_from, experiment.optimizer, experiment.scheduler):
        yield Problem(key, message)
    yield from _lightning(experiment)
    yield from _optimizers(experiment)
    yield from _swept(experiment)
    yield from _only_for_ray(parallel)
    yield from _against_local_sgd(experiment)
    yield from _layouts(experiment)
    yield from _order(experiment)
    yield from _streamed(experiment)
    if parallel.options.get("communication_hook") == "powersgd" and train.precision == "fp16":
        yield Problem(
            "parallel.options.communication_hook",
            "is powersgd, whose error feedback would keep the infinities of fp16 overflows; "
            "use train.precision: bf16, or communication_hook: fp16",
        )


def _optimizers(experiment: Experiment) -> Iterator[Problem]:
    """Find no optimizer, several ones beside a single one, and settings that several ones don't support."""
    train, names = experiment.train, list(experiment.optimizers)
    if experiment.optimizer is None and not names:
        yield Problem("optimizer", "missing; write an optimizer, or optimizers with the parameters of each")
    if experiment.optimizer is not None and names:
        yield Problem("optimizer", "both optimizer and optimizers are given; remove one")
    for name in experiment.schedulers:
        if name not in names:
            hint = did_you_mean(name, names) or f"; {', '.join(names) or 'none'} is given there"
            yield Problem(keys.child("schedulers", name), f"is no name in optimizers{hint}")
    if not names:
        return
    for name, own in experiment.by_optimizer.items():
        for key, message in finetuning.misused(None, own.optimizer, own.scheduler):
            yield Problem(own_key(key, name), message)
        if own.scheduler is not None and own.scheduler.target.endswith(".ReduceLROnPlateau"):
            message = "ReduceLROnPlateau follows one validation loss, but each optimizer has its own; use another"
            yield Problem(own_key("scheduler", name), message)
    if experiment.scheduler is not None:
        yield Problem("scheduler", f"has several optimizers; write schedulers: {{{names[0]}: ...}}")
    if all(one.every not in (None, 1) for one in experiment.optimizers.values()):
        message = "leave out steps, each by its every, so that some would train nothing; remove every from one of them"
        yield Problem("optimizers", message)
    if experiment.task is None:
        yield Problem("optimizers", "need a task that yields a loss for each, e.g. pipeline.tasks.gan.GAN; write task:")
    if train.compile is not None:
        message = "compiles the model as a whole, but a task with several optimizers calls its parts; remove it"
        yield Problem("train.compile", message)
    if train.on_nonfinite == "skip":
        message = "skips whole steps, but an optimizer may have stepped before the loss of the next one is known"
        yield Problem("train.on_nonfinite", f"{message}; write stop or rollback")


def _batch_sizes(experiment: Experiment) -> Iterator[Problem]:
    """Find a global batch that is given twice or not at all, or too small for the workers or micro-batches."""
    train, workers = experiment.train, experiment.parallel.workers
    size, by_worker = train.global_batch_size, train.batch_size_per_worker
    if not size:
        what = "the samples of one optimizer step over all workers, or train.batch_size_per_worker"
        yield Problem("train.global_batch_size", f"missing; write {what}")
        return
    if by_worker is not None and "global_batch_size" in train.model_fields_set:
        yield Problem(
            "train.batch_size_per_worker",
            f"is {by_worker}, global_batch_size is {size}; remove one (train.global_batch_size=null in an override)",
        )
        return
    if size < workers:
        yield Problem(
            "train.global_batch_size",
            f"{size} samples can't be shared by {workers} workers; use at least {workers}, or fewer parallel.workers",
        )
    for i, entry in enumerate(experiment.compare):
        if size < (entry.workers or 1):
            yield Problem(
                f"compare[{i}].workers",
                f"{entry.workers} workers can't share a global batch of {size} samples; use at most {size}",
            )
    share = size // workers
    if share and train.gradient_accumulation > share:
        yield Problem(
            "train.gradient_accumulation",
            f"is {train.gradient_accumulation}, but each worker has {share} samples per step; use at most {share}",
        )


def _taken_tags(experiment: Experiment) -> Iterator[Problem]:
    """Find tags whose names this project or MLflow gives to its own."""
    for name in experiment.tracking.tags:
        if name in OWN_TAGS or name.startswith(_RESERVED):
            yield Problem(f"tracking.tags.{name}", "is a tag that pipeline or MLflow writes; choose another name")


def _only_for_ray(parallel: Parallel) -> Iterator[Problem]:
    """Find keys that only Ray reads, written for a launcher that starts workers on this machine."""
    if parallel.launcher in ("inprocess", "torchrun"):
        for name in ("placement", "resources_per_worker", "interface"):
            if getattr(parallel, name) != Parallel.model_fields[name].default:
                message = f"has no effect with launcher: {parallel.launcher}; write launcher: ray, or remove it"
                yield Problem(f"parallel.{name}", message)
    for name, key in (("CPU", "cpus_per_worker"), ("GPU", "gpus_per_worker")):
        if name in parallel.resources_per_worker:
            yield Problem(f"parallel.resources_per_worker.{name}", f"is not a custom resource; write parallel.{key}")


def _against_local_sgd(experiment: Experiment) -> Iterator[Problem]:
    """Find settings that need equal weights on all workers after each step."""
    train, entries = experiment.train, enumerate(experiment.compare)
    options = {"parallel": experiment.parallel.options, **{f"compare[{i}]": entry.options for i, entry in entries}}
    for key in (key for key, given in options.items() if given.get("local_sgd_period") is not None):
        where = f"{key}.options.local_sgd_period"
        if train.ema is not None:
            yield Problem(where, "lets the workers' weights differ, which train.ema can't average; remove one of them")
        if train.on_nonfinite == "skip":
            yield Problem(
                where,
                "lets each worker step by itself, so they can't skip a step together; write train.on_nonfinite: stop",
            )
        if train.precision == "fp16":
            yield Problem(
                where, "lets each worker step by itself, and fp16 would skip other steps on each; use precision: bf16"
            )


def _layouts(experiment: Experiment) -> Iterator[Problem]:
    """Find fsdp with channels_last: FSDP2 shards contiguous parameters only."""
    if experiment.train.memory_format != "channels_last":
        return
    strategies = {"parallel.strategy": experiment.parallel.strategy}
    strategies |= {f"compare[{i}].strategy": entry.strategy for i, entry in enumerate(experiment.compare)}
    for key, strategy in strategies.items():
        if strategy == "fsdp":
            message = "fsdp can't shard parameters in channels_last; write ddp, or train.memory_format: contiguous"
            yield Problem(key, message)


def _streamed(experiment: Experiment) -> Iterator[Problem]:
    """Find settings that rows streamed by Ray Data don't support."""
    if not experiment.is_streamed:
        return
    parallel, size, loader = experiment.parallel, experiment.train.global_batch_size, experiment.loader
    if parallel.launcher in ("inprocess", "torchrun"):
        message = f"is {parallel.launcher}, but pipeline.data.streamed is read by Ray; write launcher: ray"
        yield Problem("parallel.launcher", message)
    for workers in range(parallel.least_workers, parallel.workers + 1):
        if size % workers:
            message = f"is {size}, which {workers} workers can't share equally, as streaming needs; use a multiple"
            yield Problem("train.global_batch_size", message)
            break
    if experiment.train.compile is not None:
        message = "needs batches of all sizes before the first step, which a stream doesn't have; remove it"
        yield Problem("train.compile", message)
    if experiment.order is not None:
        message = "has no effect on pipeline.data.streamed; shuffle the rows with Ray Data, and remove it"
        yield Problem("order", message)
    for name in ("num_workers", "collate"):
        if getattr(loader, name):
            message = (
                "has no effect on pipeline.data.streamed; use map_batches of Ray Data instead, and remove this key"
            )
            yield Problem(f"loader.{name}", message)


def _order(experiment: Experiment) -> Iterator[Problem]:
    """Find keys that the section ``order`` doesn't have, and more or less than one of those that it has."""
    order = experiment.order
    if order is None:
        return
    unknown = list(order.arguments) if order.target is None else []
    for name in unknown:
        hint = did_you_mean(name, KINDS) or f"; order takes {', '.join(KINDS)}"
        yield Problem(keys.child("order", name), f"unknown key{hint}")
    if len(order.given) > 1:
        yield Problem("order", f"{' and '.join(order.given)} are given, which are orders of their own; keep one")
    elif not (order.given or unknown):
        yield Problem("order", f"is empty; write one of {', '.join(KINDS)}")


def _is_lightning(experiment: Experiment) -> bool:
    return experiment.task is not None and experiment.task.target == lightning_module.TASK


def _lightning(experiment: Experiment) -> Iterator[Problem]:
    """Find keys that an experiment with a LightningModule doesn't support."""
    if not _is_lightning(experiment):
        return
    if experiment.task is not None and "module" in experiment.task.arguments:
        yield Problem("model", f"both model and {lightning_module.MODULE} are given; remove one")
    if experiment.metrics:
        message = "get outputs and targets, which a LightningModule doesn't return; log them in its validation_step"
        yield Problem("metrics", f"{message}: self.log(name, metric)")
    own, scheduler = experiment.optimizer, experiment.scheduler
    if (
        own is not None
        and own.target == lightning_module.OPTIMIZER
        and scheduler is not None
        and scheduler.target != lightning_module.SCHEDULER
    ):
        message = "is given without optimizer: configure_optimizers of the module returns both; move it there"
        yield Problem("scheduler", f"{message}, or write optimizer: and remove the method")
    if experiment.train.compile is not None:
        message = "would compile training_step with its logs; remove it, and compile a part in the module's __init__"
        yield Problem("train.compile", message)
    strategies = {"parallel.strategy": experiment.parallel.strategy}
    strategies |= {f"compare[{i}].strategy": entry.strategy for i, entry in enumerate(experiment.compare)}
    for key, strategy in strategies.items():
        if strategy == "dp":
            yield Problem(key, "dp copies the module for each GPU, and its logs would be lost; write ddp")


def against_state(task: object, experiment: Experiment) -> Iterator[Problem]:
    """Find settings against a state that a task, or the class of one, carries from batch to batch."""
    if (batch_dim := getattr(task, "batch_dim", None)) is None:
        return
    if not isinstance(batch_dim, int):
        yield Problem("task", f"has a batch_dim of {batch_dim!r}; write the number of a dimension, e.g. 1")
        return
    order = experiment.order
    if order is None or not order.contiguous:
        given = "missing, so samples are shuffled" if order is None else f"by {' and '.join(order.given)}"
        message = "but the task carries a state from batch to batch, whose rows must continue each other"
        yield Problem("order", f"is {given}, {message}; write order: {{contiguous: true}}")
    if experiment.optimizers:
        yield Problem("optimizers", "are not supported by a task that carries a state; write one optimizer")
    strategies = {"parallel": experiment.parallel.strategy}
    strategies |= {f"compare[{number}]": entry.strategy for number, entry in enumerate(experiment.compare)}
    for key, strategy in strategies.items():
        if strategy == "dp" and batch_dim:
            message = "splits every tensor at its first dimension, but the task's state has its rows at dimension"
            yield Problem(f"{key}.strategy", f"is dp, which {message} {batch_dim}; write ddp")


def _swept(experiment: Experiment) -> Iterator[Problem]:
    """Find a sweep's metric that isn't measured, and settings that have no effect."""
    sweep = experiment.sweep
    if sweep is None:
        return
    if source_of(sweep.metric, experiment.metrics) is None:
        known = [f"validation/{name}" for name in ("loss", *experiment.metrics)]
        hint = did_you_mean(sweep.metric, known) or f"; choose one of {', '.join(known)}"
        yield Problem("sweep.metric", f"is {sweep.metric}, which isn't measured{hint}")
    for key, message in misused(sweep):
        yield Problem(f"sweep.{key}", message)
    if experiment.train.epochs is None:
        yield Problem("train.steps", "is given, but a sweep compares trials by epochs; write train.epochs instead")
        return
    varied = sweep.parameters.get("train.epochs")
    epochs = max([experiment.train.epochs, *(n for n in (varied.candidates if varied else ()) if isinstance(n, int))])
    if sweep.asha is not None and sweep.asha.grace_epochs >= epochs:
        message = (
            f"is {sweep.asha.grace_epochs}, but trials have {counted(epochs, 'epoch')}, so that none is stopped early; "
            "write fewer"
        )
        yield Problem("sweep.asha.grace_epochs", message)

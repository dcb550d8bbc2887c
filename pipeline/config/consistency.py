"""Contradictions between keys of an experiment, which no single section can find."""

from collections.abc import Iterator

from pipeline.config import finetuning, keys, lightning_module, task_consistency
from pipeline.config.parallel import Parallel
from pipeline.config.reported import OF_TRAINING, name_problems, source_of
from pipeline.config.sampler import KINDS
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
NO_PLATEAU = "only applies to ReduceLROnPlateau, and this experiment does not use it as its scheduler"
_RESERVED = ("mlflow.", "pipeline.", "best.", "changed.")


def contradictions(experiment: Experiment) -> Iterator[Problem]:
    """Find all keys that contradict each other."""
    train, parallel = experiment.train, experiment.parallel
    if experiment.loss is None and experiment.task is None:
        yield Problem("loss", "missing. Set a loss, or a task that computes the loss.")
    if experiment.loss is not None and experiment.task is not None:
        yield Problem("loss", "loss and task cannot be combined: a task computes its own loss. Remove one of them.")
    if train.epochs is None and train.steps is None:
        yield Problem("train.epochs", "missing. Set the number of passes over the training set, or set train.steps.")
    if train.epochs is not None and train.steps is not None:
        yield Problem(
            "train.steps",
            "epochs and steps cannot be combined. Remove one of them. In an override, write train.epochs=null.",
        )
    yield from _batch_sizes(experiment)
    if parallel.is_elastic and not experiment.checkpoint.keep:
        yield Problem(
            "parallel.workers",
            f"is {list(parallel.worker_counts)}, but checkpoint.keep is 0. Training needs a checkpoint to continue "
            "with another number of workers. Set checkpoint.keep: 1, or set one number of workers.",
        )
    yield from name_problems(experiment.metrics)
    yield from _check_trained_metrics(experiment)
    for key, metric in followed(experiment).items():
        if source_of(metric, experiment.metrics) is None and lightning_module.is_named(experiment.task):
            options = {"checkpoint.best": experiment.checkpoint, "train.early_stopping.metric": train.early_stopping}
            if (section := options.get(key)) is not None and section.mode == "auto":
                message = (
                    f"{metric} is logged by the LightningModule, so pipeline cannot determine whether higher is better"
                )
                yield Problem(key, f"{message}. Set {key.rpartition('.')[0]}.mode to max or min.")
        elif source_of(metric, experiment.metrics) is None:
            known = ", ".join(f"validation/{name}" for name in ("loss", *experiment.metrics))
            yield Problem(key, f"{metric} is not measured. Choose one of {known}.")
    if train.scheduler_metric is not None and experiment.scheduler is None:
        yield Problem("train.scheduler_metric", f"{NO_PLATEAU}. Remove this key.")
    if experiment.checkpoint.best is not None and not experiment.checkpoint.keep:
        yield Problem("checkpoint.best", "needs a checkpoint, but checkpoint.keep is 0. Set checkpoint.keep: 1.")
    if experiment.tracking.register_model is not None and not experiment.tracking.log_model:
        message = "needs a logged model, but tracking.log_model is false. Set it to true, or remove this key."
        yield Problem("tracking.register_model", message)
    yield from _taken_tags(experiment)
    for key, message in finetuning.misused(train.start_from, experiment.optimizer, experiment.scheduler):
        yield Problem(key, message)
    yield from task_consistency.with_lightning(experiment)
    yield from task_consistency.with_optimizers(experiment)
    yield from _swept(experiment)
    yield from _only_for_ray(parallel)
    yield from _layouts(experiment)
    yield from _order(experiment)


def _check_trained_metrics(experiment: Experiment) -> Iterator[Problem]:
    """Find metrics of training steps that can't be computed or reported, and metrics without the validation set."""
    for name, metric in experiment.metrics.items():
        key = keys.child(f"metrics.{name}", "on")
        if "validation" not in metric.on:
            message = "Metrics always have the validation set. Set on: [train, validation], or remove this key."
            yield Problem(key, f"is [{', '.join(metric.on)}]. {message}")
        elif metric.is_trained and experiment.optimizers:
            message = (
                "train is not supported with several optimizers, whose steps have several outputs. Remove this key."
            )
            yield Problem(key, message)
        elif metric.is_trained and name in OF_TRAINING:
            yield Problem(key, f"train/{name} is already reported. Choose another name for this metric.")


def _batch_sizes(experiment: Experiment) -> Iterator[Problem]:
    """Find a global batch that is given twice or not at all, or too small for the workers or micro-batches."""
    train, workers = experiment.train, experiment.parallel.workers
    size, by_worker = train.global_batch_size, train.batch_size_per_worker
    if not size:
        message = "missing. Set the samples per optimizer step over all workers, or set train.batch_size_per_worker."
        yield Problem("train.global_batch_size", message)
        return
    if by_worker is not None and "global_batch_size" in train.model_fields_set:
        yield Problem(
            "train.batch_size_per_worker",
            f"is {by_worker}, and global_batch_size is {size}. Remove one of them. In an override, write "
            "train.global_batch_size=null.",
        )
        return
    if size < workers:
        yield Problem(
            "train.global_batch_size",
            f"{size} samples cannot be split over {workers} workers. Use at least {workers}, or fewer workers.",
        )
    if workers > (evaluated := train.evaluation_batch_size or workers):
        message = f"{counted(evaluated, 'sample')} cannot be split over {workers} workers. Use at least {workers}."
        yield Problem("train.evaluation_batch_size", message)
    if size < (baseline := experiment.benchmark.baseline.workers or 1):
        yield Problem(
            "benchmark.baseline.workers",
            f"a global batch of {size} samples cannot be split over {baseline} workers. Use at most {size}.",
        )
    share = size // workers
    if share and train.gradient_accumulation > share:
        yield Problem(
            "train.gradient_accumulation",
            f"is {train.gradient_accumulation}, but each worker has only {counted(share, 'sample')} per step. "
            f"Use at most {share}.",
        )


def _taken_tags(experiment: Experiment) -> Iterator[Problem]:
    """Find tags whose names this project or MLflow gives to its own."""
    for name in experiment.tracking.tags:
        if name in OWN_TAGS or name.startswith(_RESERVED):
            yield Problem(f"tracking.tags.{name}", "pipeline or MLflow sets this tag. Choose another name.")


def _only_for_ray(parallel: Parallel) -> Iterator[Problem]:
    """Find a placement, which only Ray reads, written for a launcher that starts workers on this machine."""
    if parallel.launcher in ("inprocess", "torchrun") and parallel.placement != "pack":
        message = f"has no effect with launcher: {parallel.launcher}. Set launcher: ray, or remove this key."
        yield Problem("parallel.placement", message)


def _layouts(experiment: Experiment) -> Iterator[Problem]:
    """Find fsdp with channels_last: FSDP2 shards contiguous parameters only."""
    if experiment.train.memory_format != "channels_last":
        return
    strategies = {
        "parallel.strategy": experiment.parallel.strategy,
        "benchmark.baseline.strategy": experiment.benchmark.baseline.strategy,
    }
    for key, strategy in strategies.items():
        if strategy == "fsdp":
            message = "fsdp cannot shard channels_last parameters. Set ddp, or train.memory_format: contiguous."
            yield Problem(key, message)


def _order(experiment: Experiment) -> Iterator[Problem]:
    """Find keys that the section ``order`` doesn't have, and more or less than one of those that it has."""
    order = experiment.sampler
    if order is None:
        return
    unknown = list(order.arguments) if order.target is None else []
    for name in unknown:
        key, hint = keys.child("sampler", name), did_you_mean(name, KINDS) or f"; sampler takes {', '.join(KINDS)}"
        yield Problem(key, f"unknown key{hint}")
    if len(order.given) > 1:
        yield Problem("sampler", f"{' and '.join(order.given)} cannot be combined. Keep one of them.")
    elif not (order.given or unknown):
        yield Problem("sampler", f"is empty. Set one of {', '.join(KINDS)}.")


def _swept(experiment: Experiment) -> Iterator[Problem]:
    """Find a sweep's metric that isn't measured, and settings that have no effect."""
    sweep = experiment.sweep
    if sweep is None:
        return
    if source_of(sweep.metric, experiment.metrics) is None:
        known = [f"validation/{name}" for name in ("loss", *experiment.metrics)]
        hint = did_you_mean(sweep.metric, known) or f"; choose one of {', '.join(known)}"
        yield Problem("sweep.metric", f"{sweep.metric} is not measured{hint}")
    for key, message in misused(sweep):
        yield Problem(f"sweep.{key}", message)
    if experiment.train.epochs is None:
        yield Problem("train.steps", "a sweep compares trials by epochs. Set train.epochs instead.")
        return
    varied = sweep.parameters.get("train.epochs")
    epochs = max([experiment.train.epochs, *(n for n in (varied.candidates if varied else ()) if isinstance(n, int))])
    if sweep.asha is not None and sweep.asha.grace_epochs >= epochs:
        message = (
            f"is {sweep.asha.grace_epochs}, but trials have {counted(epochs, 'epoch')}, so no trial would stop early. "
            f"Use fewer than {epochs}."
        )
        yield Problem("sweep.asha.grace_epochs", message)

"""Contradictions between keys of an experiment, which no single section can find. `_TABLE` has those of two keys."""

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

from pipeline.errors import Problem
from pipeline.experiment import keys
from pipeline.experiment.reported import OF_TRAINING, name_problems, source_of
from pipeline.experiment.schema import LIGHTNING, LIGHTNING_OPTIMIZER, LIGHTNING_SCHEDULER, Experiment
from pipeline.experiment.sweep import find_misuse
from pipeline.experiment.values import Component
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
OWN_RATES: Mapping[str, tuple[str, ...]] = {
    "torch.optim.lr_scheduler.OneCycleLR": ("max_lr",),
    "torch.optim.lr_scheduler.CyclicLR": ("base_lr", "max_lr"),
}
"""Schedulers that replace the optimizer's learning rate, and the arguments with their rates."""
NO_PLATEAU = "only applies to ReduceLROnPlateau, and this experiment does not use it as its scheduler"
_RESERVED = ("mlflow.", "pipeline.", "best.", "changed.")


_SKIPS_SEVERAL = "One optimizer may have updated its parameters before the next loss is computed. Set stop."
_UNSHARDED = "fsdp cannot shard channels_last parameters. Set ddp, or train.memory_format: contiguous."
_COPIED = "dp copies the module to each GPU, so its logs would be lost. Set ddp."
_PLACED = "has no effect with launcher: {other}. Set launcher: ray, or remove this key."
_LIGHTNING = f"task: {LIGHTNING}"
_TABLE = (
    ("loss: None", "task: None", "missing. Set a loss, or a task that computes the loss."),
    ("loss", "task", "loss and task cannot be combined: a task computes its own loss. Remove one of them."),
    ("train.epochs: None", "train.steps: None",
     "missing. Set the number of passes over the training set, or set train.steps."),
    ("train.steps", "train.epochs",
     "epochs and steps cannot be combined. Remove one of them. In an override, write train.epochs=null."),
    ("checkpoint.best", "checkpoint.keep: 0",
     "needs a checkpoint, but checkpoint.keep is 0. Set checkpoint.keep: 1."),
    ("train.scheduler_metric", "scheduler: None", f"{NO_PLATEAU}. Remove this key."),
    ("tracking.register_model", "tracking.log_model: False",
     "needs a logged model, but tracking.log_model is false. Set it to true, or remove this key."),
    ("parallel.placement", "parallel.launcher: inprocess", _PLACED),
    ("parallel.placement", "parallel.launcher: torchrun", _PLACED),
    ("parallel.strategy: fsdp", "train.memory_format: channels_last", _UNSHARDED),
    ("benchmark.baseline.strategy: fsdp", "train.memory_format: channels_last", _UNSHARDED),
    ("optimizer: None", "optimizers: {}",
     "missing. Set optimizer, or set optimizers with the parameters of each."),
    ("optimizer", "optimizers", "optimizer and optimizers cannot be combined. Remove one of them."),
    ("scheduler", "optimizers",
     "cannot be combined with several optimizers. Set schedulers: {{{first}: ...}} instead."),
    ("optimizers", "task: None",
     "need a task that calls update(name, loss) for each optimizer. Set task to a class of your package "
     "that does."),
    ("train.gradient_accumulation", "optimizers",
     "is {value}, but a task with several optimizers updates them within one batch. Remove this key."),
    ("train.compile", "optimizers",
     "compiles the whole model, but a task with several optimizers calls parts of it. Remove this key."),
    ("train.batch_transform", "optimizers",
     "has no effect on a step with several optimizers. Change the batch in the task, and remove this key."),
    ("train.on_nonfinite: skip", "optimizers",
     f"skip cannot be combined with several optimizers. {_SKIPS_SEVERAL}"),
    ("metrics", _LIGHTNING,
     "need outputs and targets, but a LightningModule does not return them. Call self.log(name, metric) in"
     " its validation_step instead."),
    ("train.compile", _LIGHTNING,
     "would compile training_step and its self.log calls. Remove this key, and compile submodules in the "
     "module's __init__."),
    ("parallel.strategy: dp", _LIGHTNING, _COPIED),
    ("benchmark.baseline.strategy: dp", _LIGHTNING, _COPIED),
)  # fmt: skip
"""Contradictions: two keys, of which the first is named, and the message. A key alone is one that is not at
its default; "KEY: VALUE" is a key with that value. What only torch can know stays torch's error. The step refuses
accumulation with losses over the global batch, as only the task knows that it gathers."""


def contradictions(experiment: Experiment) -> Iterator[Problem]:
    """Find all keys that contradict each other."""
    first = next(iter(experiment.optimizers), "")
    for key, with_key, message in _TABLE:
        if _has(experiment, key) and _has(experiment, with_key):
            value, other = _value(experiment, key), _value(experiment, with_key)
            yield Problem(key.partition(":")[0], message.format(value=value, other=other, first=first))
    start = experiment.train.start_from
    if start is not None and (start.run is None) == (start.file is None):
        given = "has neither run nor file. Set" if start.run is None else "has both run and file. Keep"
        yield Problem("train.start_from", f"{given} one of them.")
    for name in experiment.tracking.tags:
        if name in OWN_TAGS or name.startswith(_RESERVED):
            yield Problem(f"tracking.tags.{name}", "pipeline or MLflow sets this tag. Choose another name.")
    yield from _check_batch_sizes(experiment)
    yield from _check_optimizers(experiment)
    yield from _check_lightning_module(experiment)
    yield from name_problems(experiment.metrics)
    yield from _check_metrics(experiment)
    yield from _check_sweep(experiment)


def _has(experiment: Experiment, condition: str) -> bool:
    """Return True if an experiment has a key of the table: other than its default, or with the value after it."""
    key, _, wanted = condition.partition(": ")
    value = _value(experiment, key)
    if wanted:
        return str(value.target if isinstance(value, Component) else value) == wanted
    *sections, name = key.split(".")
    section = _value(experiment, ".".join(sections)) if sections else experiment
    return bool(value != type(section).model_fields[name].default)


def _value(experiment: Experiment, condition: str) -> Any:
    return attrgetter(condition.partition(":")[0])(experiment)


def _check_batch_sizes(experiment: Experiment) -> Iterator[Problem]:
    """Find a global batch that is given twice or not at all, or too small, and elastic training without checkpoints."""
    train, workers, parallel = experiment.train, experiment.parallel.workers, experiment.parallel
    if parallel.is_elastic and not experiment.checkpoint.keep:
        message = "Training needs a checkpoint to continue with another number of workers. Set checkpoint.keep: 1, or"
        counts = f"is {list(parallel.worker_counts)}, but checkpoint.keep is 0."
        yield Problem("parallel.workers", f"{counts} {message} set one number of workers.")
    size, by_worker = train.global_batch_size, train.batch_size_per_worker
    if not size:
        message = "missing. Set the samples per optimizer step over all workers, or set train.batch_size_per_worker."
        yield Problem("train.global_batch_size", message)
        return
    if by_worker is not None and "global_batch_size" in train.model_fields_set:
        remedy = "Remove one of them. In an override, write train.global_batch_size=null."
        message = f"is {by_worker}, and global_batch_size is {size}. {remedy}"
        yield Problem("train.batch_size_per_worker", message)
        return
    if size < workers:
        message = f"{size} samples cannot be split over {workers} workers. Use at least {workers}, or fewer workers."
        yield Problem("train.global_batch_size", message)
    if workers > (evaluated := train.evaluation_batch_size or workers):
        message = f"{counted(evaluated, 'sample')} cannot be split over {workers} workers. Use at least {workers}."
        yield Problem("train.evaluation_batch_size", message)
    if size < (baseline := experiment.benchmark.baseline.workers or 1):
        message = f"a global batch of {size} samples cannot be split over {baseline} workers. Use at most {size}."
        yield Problem("benchmark.baseline.workers", message)
    share = size // workers
    if share and train.gradient_accumulation > share:
        only = f"each worker has only {counted(share, 'sample')} per step. Use at most {share}."
        yield Problem("train.gradient_accumulation", f"is {train.gradient_accumulation}, but {only}")


def _check_optimizers(experiment: Experiment) -> Iterator[Problem]:
    """Find schedulers of unknown optimizers, and groups and schedulers that don't go together."""
    names = list(experiment.optimizers)
    for name in experiment.schedulers:
        if name not in names:
            hint = did_you_mean(name, names) or f"; optimizers has {', '.join(names) or 'no entries'}"
            yield Problem(keys.child("schedulers", name), f"is not a name in optimizers{hint}")
    for name, own in (experiment.by_optimizer or {"": experiment}).items():
        yield from keys.own_problems(_check_groups(own), name)
        if name and own.scheduler is not None and own.scheduler.target.endswith(".ReduceLROnPlateau"):
            follows = "ReduceLROnPlateau follows one validation loss, but each optimizer has its own loss"
            yield from keys.own_problems([Problem("scheduler", f"{follows}. Use another scheduler.")], name)
    if names and all(one.every not in (None, 1) for one in experiment.optimizers.values()):
        message = "each optimizer skips steps (every), so some steps would train nothing"
        yield Problem("optimizers", f"{message}. Remove every from one of them.")


def _check_groups(experiment: Experiment) -> Iterator[Problem]:
    """Find rates of groups that a scheduler with a rate of its own replaces."""
    scheduler = experiment.scheduler
    for index, group in enumerate(getattr(experiment.optimizer, "groups", ())):
        for name in OWN_RATES.get(scheduler.target, ()) if scheduler is not None and "lr" in group.settings else ():
            rates = scheduler.arguments.get(name) if scheduler is not None else None
            if not isinstance(rates, list | tuple) and "${" not in str(rates):
                message = f"has no effect, because scheduler.{name} replaces it. Set a list there, one rate per group."
                yield Problem(f"optimizer.groups[{index}].lr", message)


def _check_lightning_module(experiment: Experiment) -> Iterator[Problem]:
    """Find a model next to a module, and a scheduler of the file for an optimizer of the module."""
    task, optimizer, scheduler = experiment.task, experiment.optimizer, experiment.scheduler
    if task is None or not experiment.is_lightning:
        return
    if "module" in task.arguments:
        yield Problem("model", "model and task.module cannot be combined. Remove one of them.")
    is_modules = optimizer is not None and optimizer.target == LIGHTNING_OPTIMIZER
    if is_modules and scheduler is not None and scheduler.target != LIGHTNING_SCHEDULER:
        message = "needs an optimizer: here the module's configure_optimizers returns the optimizer"
        yield Problem("scheduler", f"{message}. Return the scheduler there, or set optimizer and remove the method.")


def _check_metrics(experiment: Experiment) -> Iterator[Problem]:
    """Find metrics of training that can't be computed, and keys that follow a metric that there is not."""
    for name, metric in experiment.metrics.items():
        message = ""
        if "validation" not in metric.on:
            message = f"is [{', '.join(metric.on)}]. Metrics always have the validation set. "
            message += "Set on: [train, validation], or remove this key."
        elif metric.is_trained and experiment.optimizers:
            message = "train is not supported with several optimizers, whose steps have several outputs"
            message += ". Remove this key."
        elif metric.is_trained and name in OF_TRAINING:
            message = f"train/{name} is already reported. Choose another name for this metric."
        if message:
            yield Problem(f"metrics.{name}.on", message)
    known = [f"validation/{name}" for name in ("loss", *experiment.metrics)]
    modes = {"checkpoint.best": experiment.checkpoint, "train.early_stopping.metric": experiment.train.early_stopping}
    for key, metric_name in experiment.followed.items():
        section = modes.get(key)
        if source_of(metric_name, experiment.metrics) is not None:
            continue
        if not experiment.is_lightning:
            yield Problem(key, f"{metric_name} is not measured. Choose one of {', '.join(known)}.")
        elif section is not None and section.mode == "auto":
            logged = f"{metric_name} is logged by the LightningModule"
            message = f"{logged}, so pipeline cannot determine whether higher is better"
            yield Problem(key, f"{message}. Set {key.rpartition('.')[0]}.mode to max or min.")
    if experiment.sweep is not None and source_of(experiment.sweep.metric, experiment.metrics) is None:
        hint = did_you_mean(experiment.sweep.metric, known) or f"; choose one of {', '.join(known)}"
        yield Problem("sweep.metric", f"{experiment.sweep.metric} is not measured{hint}")


def _check_sweep(experiment: Experiment) -> Iterator[Problem]:
    """Find settings of a sweep that have no effect."""
    if (sweep := experiment.sweep) is None:
        return
    for key, message in find_misuse(sweep):
        yield Problem(f"sweep.{key}", message)
    if experiment.train.epochs is None:
        yield Problem("train.steps", "a sweep compares trials by epochs. Set train.epochs instead.")

"""Contradictions between a task and other keys: its optimizers, a LightningModule."""

from collections.abc import Iterator

from pipeline.config import finetuning, keys, lightning_module
from pipeline.config.named_optimizers import own_key
from pipeline.config.schema import Experiment
from pipeline.errors import Problem
from pipeline.wording import did_you_mean


def with_optimizers(experiment: Experiment) -> Iterator[Problem]:
    """Find a missing optimizer, optimizer next to optimizers, and settings that several optimizers don't support."""
    train, names = experiment.train, list(experiment.optimizers)
    if experiment.optimizer is None and not names:
        yield Problem("optimizer", "missing. Set optimizer, or set optimizers with the parameters of each.")
    if experiment.optimizer is not None and names:
        yield Problem("optimizer", "optimizer and optimizers cannot be combined. Remove one of them.")
    for name in experiment.schedulers:
        if name not in names:
            hint = did_you_mean(name, names) or f"; optimizers has {', '.join(names) or 'no entries'}"
            yield Problem(keys.child("schedulers", name), f"is not a name in optimizers{hint}")
    if not names:
        return
    for name, own in experiment.by_optimizer.items():
        for key, message in finetuning.misused(None, own.optimizer, own.scheduler):
            yield Problem(own_key(key, name), message)
        if own.scheduler is not None and own.scheduler.target.endswith(".ReduceLROnPlateau"):
            message = (
                "ReduceLROnPlateau follows one validation loss, but each optimizer has its own loss. "
                "Use another scheduler."
            )
            yield Problem(own_key("scheduler", name), message)
    if experiment.scheduler is not None:
        message = f"cannot be combined with several optimizers. Set schedulers: {{{names[0]}: ...}} instead."
        yield Problem("scheduler", message)
    if all(one.every not in (None, 1) for one in experiment.optimizers.values()):
        message = (
            "each optimizer skips steps (every), so some steps would train nothing. Remove every from one of them."
        )
        yield Problem("optimizers", message)
    if experiment.task is None:
        message = "need a task that yields one loss per optimizer. Set task to a class of your package that does."
        yield Problem("optimizers", message)
    if train.compile is not None:
        message = "compiles the whole model, but a task with several optimizers calls parts of it. Remove this key."
        yield Problem("train.compile", message)
    if train.batch_transform is not None:
        message = "has no effect on a step with several optimizers. Change the batch in the task, and remove this key."
        yield Problem("train.batch_transform", message)
    if train.on_nonfinite == "skip":
        message = (
            "skip cannot be combined with several optimizers. One optimizer may have updated its parameters before "
            "the next loss is computed. Set stop."
        )
        yield Problem("train.on_nonfinite", message)


def with_lightning(experiment: Experiment) -> Iterator[Problem]:
    """Find keys that an experiment with a LightningModule doesn't support."""
    if not lightning_module.is_named(experiment.task):
        return
    if experiment.task is not None and "module" in experiment.task.arguments:
        yield Problem("model", f"model and {lightning_module.MODULE} cannot be combined. Remove one of them.")
    if experiment.metrics:
        message = "need outputs and targets, but a LightningModule does not return them"
        yield Problem("metrics", f"{message}. Call self.log(name, metric) in its validation_step instead.")
    own, scheduler = experiment.optimizer, experiment.scheduler
    if (
        own is not None
        and own.target == lightning_module.OPTIMIZER
        and scheduler is not None
        and scheduler.target != lightning_module.SCHEDULER
    ):
        message = "needs an optimizer: here the module's configure_optimizers returns the optimizer"
        yield Problem("scheduler", f"{message}. Return the scheduler there, or set optimizer and remove the method.")
    if experiment.train.compile is not None:
        message = "would compile training_step and its self.log calls"
        yield Problem("train.compile", f"{message}. Remove this key, and compile submodules in the module's __init__.")
    strategies = {
        "parallel.strategy": experiment.parallel.strategy,
        "benchmark.baseline.strategy": experiment.benchmark.baseline.strategy,
    }
    for key, strategy in strategies.items():
        if strategy == "dp":
            yield Problem(key, "dp copies the module to each GPU, so its logs would be lost. Set ddp.")

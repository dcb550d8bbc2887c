"""Contradictions between a task and other keys: its optimizers, a LightningModule, a state that it carries."""

from collections.abc import Iterator

from pipeline.config import finetuning, keys, lightning_module
from pipeline.config.named_optimizers import own_key
from pipeline.config.schema import Experiment
from pipeline.errors import Problem
from pipeline.wording import did_you_mean


def with_optimizers(experiment: Experiment) -> Iterator[Problem]:
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


def with_lightning(experiment: Experiment) -> Iterator[Problem]:
    """Find keys that an experiment with a LightningModule doesn't support."""
    if not lightning_module.is_named(experiment.task):
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

"""Task that runs an unchanged LightningModule: steps, logs, optimizer and scheduler, without Lightning's Trainer.

This file doesn't import lightning: it recognizes a LightningModule by its base classes.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from typing_extensions import override

from pipeline.errors import ExperimentError, Problem
from pipeline.experiment.schema import LIGHTNING_OPTIMIZER
from pipeline.tasks.trainee import Loss, Task, count_samples

if TYPE_CHECKING:
    from pipeline.experiment.schema import Experiment

_PACKAGES = ("lightning", "pytorch_lightning")
_LOSS = re.compile(r"((val|valid|validation|test)[/_-])?loss")
"""Names of a log that stands for the loss that a validation_step doesn't return."""
_CALLBACK = "No key of the file replaces it. Write a custom task (docs/model-and-data.md)"
_SEVERAL = "For several optimizers, use optimizers: and a task that calls update for each (docs/model-and-data.md)"
_REFUSED: Mapping[tuple[str, ...], str] = {
    ("automatic_optimization",): (
        f"Manual optimization isn't supported. Return the loss from training_step. {_SEVERAL}"
    ),
    ("prepare_data", "train_dataloader", "val_dataloader", "test_dataloader"): (
        "Set data: to a function that returns a training and a validation dataset"
    ),
    ("setup", "configure_model", "configure_sharded_model"): (
        "Build the layers in __init__, which can take arguments from the file"
    ),
    ("configure_callbacks",): "Use checkpoint.best, train.early_stopping or tracking.loggers instead of callbacks",
    ("configure_gradient_clipping", "clip_gradients"): "Set train.clip_grad_norm",
    ("lr_scheduler_step", "optimizer_step", "optimizer_zero_grad"): (
        "Return an optimizer and a torch scheduler from configure_optimizers; see train.gradient_accumulation and "
        "train.lr_scaling"
    ),
    ("on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device"): (
        "Move its code into the dataset or loader.collate, which make the batches"
    ),
    ("on_save_checkpoint", "on_load_checkpoint"): "Register the state as a buffer of the module",
    ("backward", "teardown"): _CALLBACK,
}
"""Methods that a module must not override, and what to do instead. So are all named on_*, except predict's."""
_REMEDIES = {name: remedy for names, remedy in _REFUSED.items() for name in names}


def lightning_module(kind: object) -> type | None:
    """Return lightning's class that a class derives from; None for other objects."""
    bases = kind.__mro__ if isinstance(kind, type) else ()
    named = (one for one in bases if one.__name__ == "LightningModule")
    return next((one for one in named if one.__module__.partition(".")[0] in _PACKAGES), None)


def overrides(kind: type, name: str) -> bool:
    """Return True if a class of LightningModules has its own method in place of lightning's."""
    return getattr(kind, name) is not getattr(lightning_module(kind), name)


def refused_hooks(kind: type) -> Iterator[str]:
    """Yield a message for each hook that a LightningModule overrides and that isn't supported."""
    for name in dir(lightning_module(kind)):
        is_callback = name.startswith("on_") and name != "on_gpu" and "predict" not in name
        if (name in _REMEDIES or is_callback) and overrides(kind, name):
            yield f"{kind.__name__}.{name} isn't supported. {_REMEDIES.get(name, _CALLBACK)}."
    if not overrides(kind, "training_step"):
        yield f"{kind.__name__} has no training_step; add one that returns the loss"


class Lightning(Task):
    """Task that calls a LightningModule's training_step, validation_step and test_step.

    The losses are means over samples, as in Lightning. A mean over other items, such as tokens, is returned with their
    number: ``{"loss": mean, "count": tokens}``. ``self.log`` in training_step is reported as train/NAME, in
    validation_step as validation/NAME, averaged over the samples, or items, of all workers.
    """

    def __init__(self) -> None:
        self._trainer = _Trainer()
        self._split: str | None = None
        self._paths: dict[str, str] = {}
        self._inner: list[Any] = []  # the module and those inside, once it was checked

    @staticmethod
    def experiment_problems(experiment: "Experiment", model: object) -> Iterator[Problem]:
        """Yield problems of the module's class. Other callables are checked when the model is built."""
        if not isinstance(model, type):
            return
        if lightning_module(model) is None:
            yield Problem("model._target_", f"{experiment.model.target} is not a LightningModule; remove task:")
            return
        yield from (Problem("model._target_", message) for message in refused_hooks(model))
        configures = overrides(model, "configure_optimizers")
        own = experiment.optimizer is not None and experiment.optimizer.target == LIGHTNING_OPTIMIZER
        if own and not configures:
            yield Problem("optimizer", f"missing. Set it, or add configure_optimizers to {model.__name__}.")
        if configures and not own:
            message = f"{model.__name__}.configure_optimizers also creates an optimizer; remove one of them"
            yield Problem("optimizer", message)

    def begin_step(self, step: int, *, epoch: int, batch: int) -> None:
        """Set global_step, current_epoch and batch_idx of the module."""
        self._trainer.global_step, self._trainer.current_epoch, self._trainer.calls = step, epoch, batch

    @contextmanager
    def own_evaluation(self, split: str) -> Iterator[dict[str, str]]:
        """Run the module's validation_step or test_step inside the block, see `Task`."""
        calls, self._trainer.calls, self._split, self._paths = self._trainer.calls, 0, split, {}
        try:
            yield self._paths
        finally:
            self._trainer.calls, self._split = calls, None

    @override
    def __call__(self, model: nn.Module, batch: Any) -> Loss:
        """Compute the loss of a batch by the module's step."""
        module: Any = model
        self._inner = self._inner or _check_module(module)
        logs: dict[str, Tensor] = {}
        name = f"{self._split or 'training'}_step"
        own = overrides(type(module), name)
        step = getattr(module, name if own else "training_step")
        code = getattr(step, "__code__", None)  # it may take the batch alone
        arguments = (batch, self._trainer.calls)[: 2 if code is None or code.co_flags & 0x04 else code.co_argcount - 1]
        self._trainer.calls += 1
        with _attach(self._inner, self._trainer, self._log(module, logs)):
            returned = step(*arguments)
        given = returned if isinstance(returned, Mapping) else {"loss": returned}
        loss, count = given.get("loss"), given.get("count")
        if not own:
            logs.clear()
        if loss is None and self._split:
            loss = next((value for key, value in logs.items() if _LOSS.fullmatch(key)), None)
        if not isinstance(loss, Tensor):
            _refuse(module, name, f"returned {type(loss).__name__} as its loss; return a tensor, or a dict with loss")
        if (logged := logs.get("loss")) is not None and torch.equal(logged, loss.detach()):
            del logs["loss"]  # reported anyway
        if count is None:
            return Loss(loss * count_samples(batch), logs=logs)
        count = torch.as_tensor(count, device=loss.device)
        return Loss(torch.where(count > 0, loss, 0.0) * count, count, logs=logs)  # the mean over nothing is NaN

    def _log(self, module: Any, logs: dict[str, Tensor]) -> Callable[..., None]:
        """Return the module's ``log``, which adds to ``logs``."""

        def log(name: str, value: Any, *_: Any, reduce_fx: Any = "mean", **__: Any) -> None:
            if reduce_fx not in ("mean", torch.mean):
                _refuse(module, "log", f"of {name} has reduce_fx {reduce_fx}, but only mean is supported; use mean")
            if not isinstance(value, nn.Module):
                value = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
                logs[name] = value.reshape(()) if value.numel() == 1 else value
                return
            path = next((path for path, one in module.named_modules() if one is value), None)
            if path is None or self._split is None:
                remedy = "In training, log its value of the batch; in an evaluation, make it an attribute of the module"
                _refuse(module, "log", f"of {name} got a metric. {remedy}")
            self._paths[name] = path

        return log


class _Trainer:
    """Stand-in for Lightning's Trainer: the place in the training, and nothing else."""

    barebones = False
    progress_bar_callback = None
    sanity_checking = False

    def __init__(self, *, total_steps: int = 0) -> None:
        self.global_step = self.current_epoch = 0
        self.calls = 0  # Calls of the module in this step: the index of the next batch
        self.estimated_stepping_batches = self.max_steps = total_steps
        has_ranks = dist.is_initialized()
        self.world_size, self.global_rank = (dist.get_world_size(), dist.get_rank()) if has_ranks else (1, 0)
        self.is_global_zero = self.global_rank == 0

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        message = f"the LightningModule uses self.trainer.{name}, but there is no Trainer. Pass the value to __init__."
        raise ExperimentError.of("task", message)


def configured_optimizer(module: Any, *, total_steps: int = 0) -> Optimizer:
    """Return the optimizer of configure_optimizers, with its scheduler for `configured_scheduler`."""
    if not isinstance(module, nn.Module):
        message = "has sparse gradients, which task: Lightning does not support; set sparse=False"
        raise ExperimentError.of("model", message)
    inner = _check_module(module)
    with _attach(inner, _Trainer(total_steps=total_steps), None):
        returned: Any = inner[0].configure_optimizers()
    schedulers: Any = []
    if isinstance(returned, Mapping):
        returned, schedulers = returned.get("optimizer"), returned.get("lr_scheduler", [])
    elif isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], list):
        returned, schedulers = returned
    optimizers = list(returned) if isinstance(returned, Sequence) else [returned]
    schedulers = list(schedulers) if isinstance(schedulers, Sequence) else [schedulers]
    if len(optimizers) > 1 or len(schedulers) > 1:
        several = f"{len(optimizers)} optimizers and {len(schedulers)} schedulers"
        _refuse(module, "configure_optimizers", f"returned {several}; one of each is supported. {_SEVERAL}.")
    optimizer, scheduler = optimizers[0], schedulers[0] if schedulers else None
    if not isinstance(optimizer, Optimizer):
        _refuse(module, "configure_optimizers", f"returned {type(optimizer).__name__}, not a torch optimizer")
    if isinstance(scheduler, LRScheduler):
        scheduler = {"scheduler": scheduler}
    optimizer.configured_scheduler = scheduler  # type: ignore[attr-defined]
    return optimizer


def configured_scheduler(optimizer: Any, *, interval: str, metric: str | None = None) -> Any:
    """Return the scheduler that came with the module's optimizer, advanced each ``interval``; None without one.

    ``metric`` is ``train.scheduler_metric``, which replaces the configuration's ``monitor``.
    """
    given: Any = optimizer.configured_scheduler
    if given is None:
        return None
    scheduler = given.get("scheduler")
    if given.get("frequency", 1) != 1:
        message = f"sets the scheduler's frequency to {given['frequency']}, but only 1 is supported; set 1"
        raise ExperimentError.of("optimizer", f"configure_optimizers {message}")
    monitor = given.get("monitor")
    is_plateau = isinstance(scheduler, ReduceLROnPlateau)
    if is_plateau and metric is None and monitor is not None and not _LOSS.fullmatch(monitor):
        message = f"configure_optimizers monitors {monitor}, but ReduceLROnPlateau follows validation/loss"
        raise ExperimentError.of("optimizer", f"{message}; set train.scheduler_metric: validation/{monitor}")
    if (own := given.get("interval", "epoch")) != interval and not is_plateau:
        message = f"is {interval}, but configure_optimizers advances the scheduler every {own}"
        raise ExperimentError.of("train.scheduler_interval", f"{message} (Lightning's default: epoch); set {own}")
    return scheduler


@contextmanager
def _attach(modules: Sequence[Any], trainer: _Trainer, log: Callable[..., None] | None) -> Iterator[None]:
    """Give LightningModules a trainer and a ``log`` inside the block."""
    for one in modules:
        one.__dict__["_trainer"] = trainer
        if log is not None:
            one.__dict__["log"] = log
    try:
        yield
    finally:
        for one in modules:
            one.__dict__["_trainer"] = None
            one.__dict__.pop("log", None)


def _check_module(module: Any) -> list[Any]:
    """Check a LightningModule; return it and those inside."""
    kind = type(module)
    if lightning_module(kind) is None:
        raise ExperimentError.of("model", f"is a {kind.__name__}, not a LightningModule; remove task:")
    messages = list(refused_hooks(kind))
    if not messages and not module.automatic_optimization:
        messages = [f"{kind.__name__}.automatic_optimization is False. {_REMEDIES['automatic_optimization']}."]
    if messages:
        raise ExperimentError([Problem("model", message) for message in messages])
    return [one for one in module.modules() if lightning_module(type(one)) is not None]


def _refuse(module: Any, name: str, message: str) -> NoReturn:
    raise ExperimentError.of("task", f"{type(module).__name__}.{name} {message}")

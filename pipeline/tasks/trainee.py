"""Tasks and their `Loss`, and `Trainee`: model and task as one module, which a strategy wraps."""

import copy
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from pipeline.errors import ExperimentError
from pipeline.experiment.reported import LEARNING_RATE, OF_GROUP, OF_TRAINING, mlflow_name
from pipeline.tasks.gathering import current


class Loss(NamedTuple):
    """Result of a task for one batch. A task may also return a scalar tensor: the mean over the samples of its batch.

    The loss of a step is the sum over all workers and micro-batches, divided by the count over all of them.
    """

    sum: Tensor = cast(Tensor, None)
    """Scalar: sum of the losses of all items of the batch, 0 without items. With several optimizers, None."""
    count: Tensor | None = None  # type: ignore[assignment] # tuple.count
    """Scalar: number (or weight) of the items, e.g. boxes or tokens without padding. None: the number of samples.

    Return it for every batch, or for none.
    """
    outputs: Any = None  # First argument of the metrics
    targets: Any = None  # Second argument of the metrics
    logs: Mapping[str, Tensor] = MappingProxyType({})
    """Scalars to report in addition to the loss, e.g. its terms: means over the same items, weighted by their count.

    ``kl`` is reported as train/kl for each step and as validation/kl. Return the same names for every batch of
    training, and for every batch of an evaluation. Whatever is not a mean is a metric.
    """


class Task(Protocol):
    """Computation of the loss of one batch, in training and in evaluation.

    Modules and parameters among its attributes are trained, saved and sharded with the model, as "task.NAME".

    A task may have further methods:

    - ``begin_step(step, *, epoch, batch)``, called before each optimizer step with the steps and epochs done, and the
      batches of this epoch that this rank has done, e.g. to warm up a term of the loss;
    - ``pictures(model) -> Mapping[str, Tensor]``, called after each evaluation, returns images by name, of shape
      (images, channels, height, width) with values from 0 to 1. They are logged as samples/NAME-STEP.png;
    - ``own_evaluation(split)`` returns a context in which calls evaluate "validation" or "test", with other logs. It
      yields a mapping from the name to report to the path of a metric in the model that the calls update.
    """

    def __call__(self, model: nn.Module, batch: Any) -> Loss | Tensor:
        """Compute the loss of a batch, which is the result of collate_fn on the model's device.

        With several optimizers a task gets a third argument, a function ``update(name, loss)``. It calls ``update`` for
        each optimizer with the mean over the samples; the code after a call runs after the optimizer's step. It returns
        nothing, or ``Loss(outputs=..., targets=..., logs=...)``.
        """


class Trainee(nn.Module):
    """Model and task as one module. ``forward`` is the task; parameters are named "model.NAME" and "task.NAME"."""

    def __init__(self, model: nn.Module, task: Callable[..., Any]) -> None:
        super().__init__()
        self.keeps_outputs = False
        """True to also return outputs and targets in training; else logits of a large vocabulary are freed."""
        self.model = model
        self.task = task if isinstance(task, nn.Module) else AsModule(task)
        # By mode: whether batches have a count, and names of logs. A dict, which the replicas of dp share.
        self._returned: dict[bool, tuple[bool, frozenset[str]]] = {}

    @property
    def own_task(self) -> Any:
        """The user's task, or the default one around the loss."""
        return self.task.inner if isinstance(self.task, AsModule) else self.task

    @override
    def train(self, mode: bool = True) -> "Trainee":
        if not mode:  # each evaluation may have its own logs
            self._returned.pop(False, None)
        return super().train(mode)

    @override
    def forward(self, batch: Any) -> Loss:
        """Return the loss of a batch; only its sum has a graph."""
        try:
            found = self.task(self.model, batch)
            if isinstance(found, Tensor) and not found.ndim:
                found = Loss(found * count_samples(batch))
        finally:  # after an error, too
            current.end()
        if not isinstance(found, Loss):
            message = "return Loss(sum, count), or a scalar, the mean over the samples"
            raise self._make_error(f"returned {_describe_shape(found)}; {message}")
        self._check_scalar("sum", found.sum)
        return self._detach(found)

    def with_updates(self, batch: Any, update: Callable[[str, Tensor], None]) -> Loss:
        """Let the task update several optimizers for a batch; return the rest of its result, without sum and count."""
        try:
            found = self.task(self.model, batch, update)
        finally:
            current.end()
        if found is None:
            found = Loss()
        if not isinstance(found, Loss):
            message = "call update(name, loss) for each loss, and return nothing or Loss(outputs, targets, logs)"
            raise self._make_error(f"returned {_describe_shape(found)}; with optimizers, {message}")
        if found.sum is not None or found.count is not None:
            message = "which several optimizers don't support; give update the mean over the samples"
            raise self._make_error(f"returned Loss.sum or count, {message}")
        return self._detach(found)

    def _detach(self, found: Loss) -> Loss:
        """Check and detach all but the sum, so that DDP doesn't search their graph, and they hold no activations."""
        total, count, outputs, targets, logs = found
        returned = self._returned.get(self.training)
        if returned is None:
            self._check(found)
        elif returned[0] is (count is None):
            raise self._make_error("returns Loss.count for some batches and None for others; return it for all or none")
        elif logs.keys() != returned[1]:
            own, first = (", ".join(sorted(map(str, names))) or "nothing" for names in (logs, returned[1]))
            message = "Return the same names for every batch of training, and for every batch of an evaluation."
            raise _make_log_error(f"has {own} in one batch, but {first} in the first. {message}")
        if count is not None:
            self._check_scalar("count", count)
            count = count.detach()
            if total is not None and count.device != total.device:
                count = count.to(total.device, non_blocking=True)
        if logs:
            logs = {name: _log(name, one, total, count) for name, one in logs.items()}
        if self.training and not self.keeps_outputs:
            outputs = targets = None
        elif torch.is_grad_enabled():
            outputs, targets = tree_map_only(Tensor, Tensor.detach, (outputs, targets))
        return Loss(total, count, outputs, targets, logs)

    def _check(self, found: Loss) -> None:
        """Check the count, logs and names in the first batch, which hold for all others."""
        if not isinstance(found.logs, Mapping):
            raise _make_log_error(f"is {describe(found.logs)}, not a mapping from names to scalar tensors")
        taken = set(OF_TRAINING)
        for name in found.logs:
            if not isinstance(name, str) or not name:
                raise _make_log_error(f"has the name {name!r}; use a non-empty string")
            if (written := mlflow_name(name)) in taken or written.startswith(f"{LEARNING_RATE}{OF_GROUP}"):
                message = f"has the name {name}, but train/{written} is already reported"
                raise _make_log_error(f"{message}; choose another name")
            taken.add(written)
        self._returned[self.training] = found.count is not None, frozenset(found.logs)

    def _check_scalar(self, name: str, value: object) -> None:
        if not isinstance(value, Tensor) or value.ndim:
            raise self._make_error(f"returned {_describe_shape(value)} as Loss.{name}; it must be a scalar tensor")

    def _make_error(self, message: str) -> ExperimentError:
        return ExperimentError.of(getattr(self.task, "error_key", "task"), message)


class AsModule(nn.Module):
    """A task or loss that isn't a module; its attributes that are modules or parameters are registered."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["inner"] = inner
        for name, value in getattr(inner, "__dict__", {}).items():
            if isinstance(value, nn.Module | nn.Parameter):
                setattr(self, name, value)
        self._held = (*self._parameters, *self._modules)

    @override
    def forward(self, *arguments: Any) -> Any:
        inner = self.__dict__["inner"]
        if self._held:  # a strategy replaces registered parameters, by shards or by copies on another device
            if getattr(self, "_is_replica", False):  # of dp, whose threads must not share attributes
                inner = copy.copy(inner)
            for name in self._held:
                inner.__dict__[name] = getattr(self, name)
        return inner(*arguments)


def count_samples(batch: Any) -> int:
    """Return the samples of the batch of this pass; outside of a pass, the rows of the batch."""
    samples = current.samples if current.samples is not None else _rows(batch)
    if samples is None:
        message = f"a batch is {describe(batch)}, whose samples can't be counted; return Loss(sum, count)"
        raise ExperimentError.of("task", message)
    return samples


def describe(value: object) -> str:
    """Return what a value is, for messages."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a mapping with the keys {', '.join(map(str, value))}"
    if isinstance(value, tuple | list):
        parts = (f"Tensor {tuple(one.shape)}" if isinstance(one, Tensor) else type(one).__name__ for one in value)
        return f"a {type(value).__name__} of {len(value)}: {', '.join(parts)}"
    return f"of type {type(value).__name__}"


def _rows(batch: Any) -> int | None:
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else None
    fields = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    tensors = (len(one) for one in fields if isinstance(one, Tensor) and one.ndim)
    mappings = (rows for one in fields if isinstance(one, Mapping) and (rows := _rows(one)) is not None)
    lists = (len(one) for one in fields if isinstance(one, list | tuple))
    return next((rows for found in (tensors, mappings, lists) for rows in found), None)


def _log(name: str, value: Any, total: Tensor | None, count: Tensor | None) -> Tensor:
    if not isinstance(value, Tensor) or value.ndim:
        message = f"has {_describe_shape(value)} as {name}; it must be a scalar tensor, the mean over the batch"
        raise _make_log_error(message)
    value = value.detach() if total is None else value.detach().to(total.device, total.dtype)
    return value if count is None else torch.where(count != 0, value, 0.0)  # the mean over nothing is NaN


def _describe_shape(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _make_log_error(message: str) -> ExperimentError:
    return ExperimentError.of("task", f"Loss.logs {message}")

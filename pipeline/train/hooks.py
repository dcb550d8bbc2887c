"""Hooks, which don't change how a gradient is computed: their interface, and those that keys of the file ask for."""

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim.swa_utils import get_ema_multi_avg_fn
from typing_extensions import override

from pipeline.errors import ExperimentError
from pipeline.experiment import keys
from pipeline.experiment.train import EarlyStopping as StoppingOptions
from pipeline.experiment.train import Ema as EmaOptions
from pipeline.experiment.values import Direction
from pipeline.protocol.trial import Training
from pipeline.tasks import describe
from pipeline.train.metrics import Readings, SharedMetrics, build_collection
from pipeline.train.ranks import broadcast_from_first, local, shard_like
from pipeline.wording import counted, figure

if TYPE_CHECKING:
    from pipeline.train.state import State


class Hook:
    """Base of all hooks, built in or of ``hooks:`` in the file. Each method is optional, and called on all ranks.

    Under the path of its class, a hook's state is part of checkpoints.
    """

    def start(self, s: "State") -> None:
        """Prepare once all is built, before a checkpoint is loaded.

        Raises:
            ExperimentError: the experiment contradicts itself.
        """

    def transform(self, batch: Any) -> Any:
        """Return a training batch changed on its device, with as many samples, e.g. by MixUp.

        Random numbers are seeded before.
        """
        return batch

    def before_update(self, s: "State") -> None:
        """Read or change the gradients of the global batch, `State.gradients`, before they are clipped.

        ``s.step`` is the number of this step, counted from 0.
        """

    def after_step(self, s: "State") -> None:
        """Follow a step, also one that was skipped; ``s.step`` is its number, counted from 0."""

    def report(self, s: "State") -> Mapping[str, float | Tensor]:
        """Return values by name, reported as train/NAME with the losses about three times a second. Collective."""
        return {}

    def after_evaluation(self, s: "State", values: Mapping[str, float]) -> Mapping[str, float] | None:
        """Follow the values of an evaluation, equal on all ranks; return others to report.

        Setting ``s.stop_reason`` on all ranks ends the training, after a checkpoint.
        """

    def evaluating(self, s: "State") -> AbstractContextManager[object]:
        """Return a context in which the model has the weights to evaluate and to save as the result. Collective."""
        return nullcontext()

    def state_dict(self) -> Mapping[str, Any]:
        """Return what a resumed training needs: numbers, texts and tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""


def name_of(hook: Hook) -> str:
    """Return the key of a hook's state in a checkpoint."""
    return f"{type(hook).__module__}.{type(hook).__qualname__}"


_MUCH = 0.2  # Share of the initial weights in the averages from which a warning is due
_TRANSFORM, _STOPPING = "train.batch_transform", "train.early_stopping"


def find_hooks(s: "State") -> tuple[Hook, ...]:
    """Return the hooks that a training has: those of keys, then those of the section ``hooks``."""
    train, is_training = s.experiment.train, isinstance(s.trial, Training)
    found: list[Hook] = []
    if train.batch_transform is not None:
        found.append(BatchTransform(s))
    if is_training and any(metric.is_trained for metric in s.experiment.metrics.values()):
        found.append(TrainedMetrics(s))
    if train.ema is not None:
        found.append(Ema(train.ema))
    if is_training and train.early_stopping is not None:
        if not s.batches.has("validation"):
            message = f"monitors {train.early_stopping.metric}, but there is no validation set; remove it"
            raise ExperimentError.of(_STOPPING, message)
        direction = s.direction(train.early_stopping.metric, train.early_stopping.mode, key=f"{_STOPPING}.metric")
        found.append(EarlyStopping(train.early_stopping, direction=direction))
    for number, component in enumerate(s.filled.hooks):
        key = keys.child("hooks", number)
        hook = s.create(component, key=key)
        if not isinstance(hook, Hook):
            message = f"is a {type(hook).__name__}, not a pipeline.train.Hook; derive it from Hook"
            raise ExperimentError.of(key, message)
        if s.experiment.optimizers and type(hook).transform is not Hook.transform:
            message = "transforms batches, which several optimizers don't support; do it in the task"
            raise ExperimentError.of(key, message)
        if name_of(hook) in map(name_of, found):
            raise ExperimentError.of(key, f"is a second {name_of(hook)}; list each hook once")
        found.append(hook)
    return tuple(found)


class Ema(Hook):
    """Averages of all real and complex parameters and of the running statistics of normalization layers.

    The arithmetic is torch's. Its AveragedModel copies the model, which would make the host wait for the device in each
    step, and fails for a sharded model. After a step that was skipped they are updated, too: they are a function of the
    steps done.
    """

    def __init__(self, options: EmaOptions) -> None:
        self._options = options
        self._update = get_ema_multi_avg_fn(options.decay)  # type: ignore[no-untyped-call]

    @override
    def start(self, s: "State") -> None:
        self._own = {
            name: one
            for name, one in s.trainee.named_parameters()
            if (one.is_floating_point() or one.is_complex()) and (name.startswith("model.") or one.requires_grad)
        }
        for place, module in s.trainee.named_modules():
            for name in ("running_mean", "running_var") if isinstance(module, _NormBase) else ():
                if (statistic := getattr(module, name)) is not None:
                    self._own[f"{place}.{name}"] = statistic
        self.averages: dict[str, Tensor] = {name: one.detach().clone() for name, one in self._own.items()}
        """Averages by name, sharded like the weights."""
        rest = self._options.decay ** max(0, s.total_steps - max(1, self._options.start_step))
        if rest > _MUCH and isinstance(s.trial, Training):
            s.warn(
                f"train.ema: after {s.total_steps} steps, {int(100 * rest)}% of the averages are still initial "
                "weights. Lower the decay."
            )

    @override
    @torch.no_grad()
    def after_step(self, s: "State") -> None:
        averages, own = ([local(one) for one in group.values()] for group in (self.averages, self._own))
        if s.step < max(1, self._options.start_step):
            torch._foreach_copy_(averages, own)
            return
        for kind in dict.fromkeys((one.dtype, one.device) for one in own):
            chosen = [pair for pair in zip(averages, own, strict=True) if (pair[1].dtype, pair[1].device) == kind]
            self._update(*map(list, zip(*chosen, strict=True)), 0)

    @override
    @contextmanager
    def evaluating(self, s: "State") -> Iterator[None]:
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, own in self._own.items():
            average = local(self.averages[name])
            kept = average.clone()
            average.copy_(local(own))
            local(own).copy_(kept)

    @override
    def state_dict(self) -> Mapping[str, Any]:
        return dict(self.averages)

    @override
    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, average in self.averages.items():
            saved = state[name]
            local(average).copy_(local(saved if hasattr(saved, "device_mesh") else shard_like(saved, average)))


class EarlyStopping(Hook):
    """End of a training after evaluations without improvement, counted alike on all ranks."""

    def __init__(self, options: StoppingOptions, *, direction: Direction) -> None:
        self._options, self._direction = options, direction
        self._best: float | None = None
        self._best_step = self._waited = 0

    @override
    def after_evaluation(self, s: "State", values: Mapping[str, float]) -> None:
        metric = self._options.metric
        if metric not in values:
            message = f"{metric} is not reported; name one of {', '.join(values)}"
            raise ExperimentError.of(f"{_STOPPING}.metric", message)
        value, sign = values[metric], 1 if self._direction == "max" else -1
        is_better = self._best is None or sign * (value - self._best) > self._options.min_delta
        if is_better and not math.isnan(value):
            self._best, self._best_step, self._waited = value, s.step, 0
        else:
            self._waited += 1
        if self._waited < self._options.patience:
            return
        waited = f"in {counted(self._waited, 'evaluation')}"
        s.stop_reason = f"{metric} was NaN {waited}"
        if self._best is not None:
            s.stop_reason = f"{metric} has not improved from {figure(self._best)} (step {self._best_step}) {waited}"

    @override
    def state_dict(self) -> Mapping[str, Any]:
        return {"best": self._best, "best_step": self._best_step, "waited": self._waited}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best, self._best_step, self._waited = state["best"], state["best_step"], state["waited"]


class BatchTransform(Hook):
    """Transformation of whole batches, such as MixUp and CutMix, with random numbers from the micro-batch's seed."""

    def __init__(self, s: "State") -> None:
        component = s.filled.train.batch_transform
        assert component is not None
        transform = s.create(component, key=_TRANSFORM)
        if not callable(transform):
            message = f"{component.target} returned a {type(transform).__name__}, which can't be called"
            raise ExperimentError.of(_TRANSFORM, f"{message}; return a function of inputs and targets")
        self._transform = transform.to(s.device) if isinstance(transform, nn.Module) else transform

    @override
    def transform(self, batch: Any) -> Any:
        _check_pair(batch, "a batch", remedy="remove this key, or transform the samples in loader.collate")
        with _explain_errors(_TRANSFORM, "raised"):
            found = self._transform(*batch)
        _check_pair(found, "the returned value", remedy="return both")
        return found


def _check_pair(value: Any, what: str, *, remedy: str) -> None:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ExperimentError.of(_TRANSFORM, f"{what} is {describe(value)}, not (inputs, targets); {remedy}")


@contextmanager
def _explain_errors(key: str, raised: str) -> Iterator[None]:
    """Give errors of user code inside the block the key that names it."""
    try:
        yield
    except (ExperimentError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        raise ExperimentError.of(key, f"{raised} {type(error).__name__}: {said}") from error


class TrainedMetrics(Hook):
    """Metrics of the outputs of all training steps since the last report, over all ranks.

    A checkpoint follows a report, so it has the states that metrics keep over reports, and no others.
    """

    def __init__(self, s: "State") -> None:
        declared = {name: metric for name, metric in s.filled.metrics.items() if metric.is_trained}
        self._metrics = build_collection(s.create, declared, device=s.device)
        self._key = f"metrics.{next(iter(declared))}" if len(declared) == 1 else "metrics"
        self._mixes = s.experiment.train.batch_transform is not None
        s.trainee.keeps_outputs = True
        self._shared = SharedMetrics(self._metrics, rank=s.rank, copies=s.copies)

    @override
    def after_step(self, s: "State") -> None:
        for outputs, targets in s.outputs:
            if self._mixes and isinstance(targets, Tensor) and targets.is_floating_point() and targets.ndim == 2:
                targets = targets.argmax(1)  # labels became class probabilities: the class with the largest part
            with torch.no_grad(), self._explain_errors():
                self._shared.update(outputs, targets)

    @override
    def report(self, s: "State") -> Mapping[str, float | Tensor]:
        self._shared.merge()
        with warnings.catch_warnings(action="ignore"):  # of classes that these steps lack
            values = broadcast_from_first(self._read, rank=s.rank)
        self._metrics.reset()
        self._shared = SharedMetrics(self._metrics, rank=s.rank, copies=s.copies)
        return values.values

    @override
    def state_dict(self) -> Mapping[str, Any]:
        return dict(self._metrics.state_dict())

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._metrics.load_state_dict(dict(state), strict=False)

    def _read(self) -> Readings:
        with torch.no_grad(), self._explain_errors():
            return self._shared.read()

    def _explain_errors(self) -> AbstractContextManager[None]:
        return _explain_errors(self._key, "on: [train, validation] raised for training batches")

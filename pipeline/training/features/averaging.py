"""Exponential moving average (EMA) of the weights (``train.ema``)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim.swa_utils import get_ema_multi_avg_fn
from typing_extensions import override

from pipeline.config.train import Ema
from pipeline.protocol.events import Outbox, Warned
from pipeline.training.context import TrainContext
from pipeline.training.feature import Feature, Saved
from pipeline.training.model.learned import PREFIX
from pipeline.training.ranks.norms import local
from pipeline.training.step.plain import Parts, Stepped

MUCH = 0.2
"""Share of the initial weights in the averages from which a warning is due."""


class Averaging(Feature):
    """Update of the averages, also after a step that was skipped: they are a function of the steps done."""

    name: ClassVar[str] = "averages"
    belongs_to_weights: ClassVar[bool] = True

    def __init__(self, training: TrainContext, ema: Ema) -> None:
        self._training = training
        self.averages = Averages(training.model, ema, learned=training.learned)

    @override
    @classmethod
    def of(cls, training: TrainContext) -> Self | None:
        return cls(training, ema) if (ema := training.experiment.train.ema) is not None else None

    @override
    def start(self, outbox: Outbox) -> None:
        total = self._training.total_steps
        if (share := self.averages.share_of_start(total)) > MUCH and self._training.rank.is_first:
            message = (
                f"train.ema: after {total} steps, {int(100 * share)}% of the averages are still initial weights. Lower "
                "the decay."
            )
            outbox.event(Warned(trial=self._training.trial.name, message=message))

    @override
    def around_update(self, parts: Parts) -> Parts:
        def step(final: Parts, training: TrainContext, number: int, micro_batches: Any) -> Stepped:
            stepped = parts.step(final, training, number, micro_batches)
            self.averages.update(step=number)
            return stepped

        return parts._replace(step=step)

    @override
    @contextmanager
    def evaluating(self) -> Iterator[None]:
        self.averages.exchange()
        try:
            yield
        finally:
            self.averages.exchange()

    @override
    def state_dict(self) -> Mapping[str, Any]:
        return dict(self.averages.tensors)

    @override
    def load_state_dict(self, state: Mapping[str, Any] | None, *, saved: Saved) -> None:
        self.averages.load(state or {})  # saved by a run without averages, which start at its weights


class Averages:
    """Averages of a model's real and complex parameters and of the running statistics of its normalization layers.

    Other buffers, such as masks, are not averaged. The arithmetic is torch's. Its AveragedModel copies the model, which
    would make the host wait for the device in each step, and fails for a sharded model.
    """

    def __init__(self, model: nn.Module, ema: Ema, *, learned: nn.Module | None = None) -> None:
        """Begin with a copy of the current weights, including those of a task (``learned``)."""
        self._ema = ema
        self._update = get_ema_multi_avg_fn(ema.decay)  # type: ignore[no-untyped-call]
        self._averaged = {**dict(_averaged(model)), **_named(learned)}
        self.tensors: Mapping[str, Tensor] = {name: own.detach().clone() for name, own in self._averaged.items()}
        """Averages by parameter name, sharded like the model."""

    @torch.no_grad()
    def update(self, *, step: int) -> None:
        """Update the averages after a step, counted from 0; until ``start_step`` they are copies of the weights."""
        if not self._averaged:
            return
        averages, own = ([local(one) for one in group.values()] for group in (self.tensors, self._averaged))
        if step < max(1, self._ema.start_step):
            torch._foreach_copy_(averages, own)
        else:
            for kind in dict.fromkeys((one.dtype, one.device) for one in own):
                chosen = [pair for pair in zip(averages, own, strict=True) if (pair[1].dtype, pair[1].device) == kind]
                self._update([pair[0] for pair in chosen], [pair[1] for pair in chosen], 0)

    @torch.no_grad()
    def exchange(self) -> None:
        """Swap the averages with the model's weights; a second call undoes it."""
        for name, own in self._averaged.items():
            average = local(self.tensors[name])
            kept = average.clone()
            average.copy_(local(own))
            local(own).copy_(kept)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load saved averages; take the model's weights where a checkpoint has none, as if ``train.ema`` is new."""
        for name, tensor in self.tensors.items():
            tensor.copy_(tensors.get(name, self._averaged[name]))

    def share_of_start(self, steps: int) -> float:
        """Return the weight of the initial values in the averages after ``steps`` steps, between 0 and 1."""
        return float(self._ema.decay ** max(0, steps - max(1, self._ema.start_step)))


def _named(learned: nn.Module | None) -> dict[str, Tensor]:
    if learned is None:
        return {}
    return {f"{PREFIX}{name}": one for name, one in learned.named_parameters() if one.requires_grad}


def _averaged(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from ((name, own) for name, own in model.named_parameters() if own.is_floating_point() or own.is_complex())
    for place, module in model.named_modules():
        if isinstance(module, _NormBase):
            for name in ("running_mean", "running_var"):
                if (statistic := getattr(module, name)) is not None:
                    yield f"{place}.{name}" if place else name, statistic

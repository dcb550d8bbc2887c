"""Steps that are computed but leave the weights as they are: not finite (``train.on_nonfinite: skip``)."""

from typing import Any, Self

import torch
from torch import Tensor
from typing_extensions import override

from pipeline.training.context import TrainContext
from pipeline.training.feature import Feature
from pipeline.training.model.buffers import Buffers
from pipeline.training.model.parameter_set import ParameterSet
from pipeline.training.step.plain import Parts, Stepped


class Skipping(Feature):
    """Skipping of steps.

    A step is skipped if its loss or a gradient is not finite. It is computed all the same, so that ranks and loaders
    keep in step; then the weights and the optimizer's state stay as they are, and buffers such as BatchNorm's
    statistics are restored.
    """

    def __init__(self, training: TrainContext) -> None:
        self._training = training

    @override
    @classmethod
    def of(cls, training: TrainContext) -> Self | None:
        return cls(training) if training.experiment.train.on_nonfinite == "skip" else None

    @override
    def around_update(self, parts: Parts) -> Parts:
        def backward(loss: Tensor) -> None:
            # An infinite loss with finite gradients reaches all ranks as a gradient of NaN.
            parts.backward(loss * (1 + 0 * loss.detach()))

        def update(step: int, parameter_set: ParameterSet) -> bool:
            if not self._is_finite(parameter_set):
                parameter_set.clear()
                return False
            return parts.update(step, parameter_set)

        def step(final: Parts, training: TrainContext, number: int, micro_batches: Any) -> Stepped:
            buffers = Buffers(training.whole)
            # Reading the scale waits for the device, which is idle here, after the read at the end of the step before.
            scale = self._training.scaler.get_scale()
            stepped = parts.step(final, training, number, micro_batches)
            if self._training.scaler.get_scale() < scale:  # fp16 gradients overflowed: the optimizer did nothing
                stepped = stepped._replace(has_updated=False)
            if not stepped.has_updated:
                buffers.restore()
            return stepped

        return parts._replace(backward=backward, update=update, step=step)

    def _is_finite(self, parameter_set: ParameterSet) -> bool:
        """Return True if no gradient is known to be infinite or NaN; the host waits for the device."""
        if self._training.scaler.is_enabled():  # the scaler checks gradients itself
            return True
        return bool(torch.isfinite(parameter_set.norm()))

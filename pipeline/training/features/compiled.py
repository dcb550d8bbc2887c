"""Reported values of a compiled model (``train.compile``)."""

from typing import Self

from torch import Tensor
from typing_extensions import override

from pipeline.tasks import StepOutput
from pipeline.training.context import TrainContext
from pipeline.training.feature import Feature
from pipeline.training.step.plain import Parts


class Compiled(Feature):
    """Copy of what is reported of an output: a CUDA graph that is replayed overwrites what it returned."""

    @override
    @classmethod
    def of(cls, training: TrainContext) -> Self | None:
        return cls() if training.built.compiling is not None else None

    @override
    def around_gradients(self, parts: Parts) -> Parts:
        def value(loss: Tensor, output: StepOutput) -> Tensor:
            return parts.value(loss, output).clone()

        return parts._replace(value=value)

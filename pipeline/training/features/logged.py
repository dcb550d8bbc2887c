"""Logs of a task (`StepOutput.logs`), which are reported with the loss of a step."""

from typing import Self

from torch import Tensor
from typing_extensions import override

from pipeline.tasks import StepOutput
from pipeline.training.context import TrainContext
from pipeline.training.feature import Feature
from pipeline.training.logs import with_loss
from pipeline.training.step.plain import Parts


class Logged(Feature):
    """Value of an output with its logs, a vector of loss and logs."""

    def __init__(self, training: TrainContext) -> None:
        self._training = training

    @override
    @classmethod
    def of(cls, training: TrainContext) -> Self | None:
        return cls(training)

    @override
    def around_gradients(self, parts: Parts) -> Parts:
        if not (names := self._training.seen.log_names):
            return parts

        def value(loss: Tensor, output: StepOutput) -> Tensor:
            return with_loss(parts.value(loss, output), output, names=names)

        return parts._replace(value=value)

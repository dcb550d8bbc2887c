"""Gradients of a task's own parameters, which the strategy does not exchange."""

from typing import Self

from torch import Tensor
from typing_extensions import override

from pipeline.training.context import TrainContext
from pipeline.training.feature import Feature
from pipeline.training.model.learned import exchange_gradients, trainable
from pipeline.training.step.plain import Parts


class LearnedGradients(Feature):
    """Sum of these gradients over all ranks, once a step."""

    def __init__(self, training: TrainContext) -> None:
        self._training = training

    @override
    @classmethod
    def of(cls, training: TrainContext) -> Self | None:
        is_needed = training.learned is not None and training.rank.world_size > 1
        return cls(training) if is_needed and not training.experiment.optimizers else None

    @override
    def around_gradients(self, parts: Parts) -> Parts:
        training = self._training
        if not parts.exchanges:
            return parts

        def complete(loss: Tensor) -> Tensor:
            scale = training.strategy.gradient_scale
            exchange_gradients(trainable(training.learned), scale=scale, device=training.device)
            return parts.complete(loss)

        return parts._replace(complete=complete)

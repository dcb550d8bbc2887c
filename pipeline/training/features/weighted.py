"""Losses that are means over something other than samples (`StepOutput.weight`), such as tokens without padding."""

from typing import Any, Self

from torch import Tensor
from typing_extensions import override

from pipeline.tasks import StepOutput
from pipeline.training.batches.order import MicroBatch
from pipeline.training.batches.weighting import Denominator
from pipeline.training.context import TrainContext
from pipeline.training.feature import Feature
from pipeline.training.step.plain import Parts, Stepped


class Weighted(Feature):
    """Weighting of each micro-batch by what its loss is a mean of, see `pipeline.training.batches.weighting`."""

    def __init__(self, training: TrainContext) -> None:
        self._training = training
        self._denominator: Denominator | None = None

    @override
    @classmethod
    def of(cls, training: TrainContext) -> Self | None:
        return cls(training) if not training.experiment.optimizers else None

    @override
    def around_gradients(self, parts: Parts) -> Parts:
        training = self._training
        if not training.seen.gives_weight:
            return parts

        def step(final: Parts, training: TrainContext, number: int, micro_batches: Any) -> Stepped:
            self._denominator = None  # a measured step may have failed half-way
            return parts.step(final, training, number, micro_batches)

        def forward(micro_batch: MicroBatch, batch: Any) -> StepOutput:
            if training.seen.boundary is not None:
                training.seen.boundary.clear()
            return parts.forward(micro_batch, batch)

        def weigh(micro_batch: MicroBatch, output: StepOutput) -> tuple[Tensor, Any]:
            self._denominator = self._denominator or Denominator(
                micro_batches=training.accumulation,
                is_shared=parts.exchanges and training.rank.world_size > 1,
                boundary=training.seen.boundary,
            )
            return self._denominator.counted(output, micro_batch)

        def complete(loss: Tensor) -> Tensor:
            denominator, self._denominator = self._denominator, None
            assert denominator is not None
            return parts.complete(denominator.settle(loss, gradients=training.parameter_set.gradients()))

        return parts._replace(step=step, forward=forward, weigh=weigh, complete=complete)

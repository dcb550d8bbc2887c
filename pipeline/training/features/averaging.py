"""Moving average of the weights (``train.ema``) after each step."""

from typing import Any, Self

from typing_extensions import override

from pipeline.training.context import TrainContext
from pipeline.training.feature import Feature
from pipeline.training.step.plain import Parts, Stepped


class Averaging(Feature):
    """Update of the averages, also after a step that was skipped: they are a function of the steps done."""

    @override
    @classmethod
    def of(cls, training: TrainContext) -> Self | None:
        return cls() if training.averages is not None else None

    @override
    def around_update(self, parts: Parts) -> Parts:
        def step(final: Parts, training: TrainContext, number: int, micro_batches: Any) -> Stepped:
            stepped = parts.step(final, training, number, micro_batches)
            if training.averages is not None:  # a training that is over may have freed them
                training.averages.update(step=number)
            return stepped

        return parts._replace(step=step)

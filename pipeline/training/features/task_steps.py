"""Tasks that depend on their place in the training (`pipeline.tasks.InSteps`)."""

from typing import Any, Self

from typing_extensions import override

from pipeline.training.context import TrainContext
from pipeline.training.feature import Feature
from pipeline.training.step.plain import Parts, Stepped


class TaskSteps(Feature):
    """Call of the task before the batches of a step are read."""

    @override
    @classmethod
    def of(cls, training: TrainContext) -> Self | None:
        return cls() if training.in_steps is not None else None

    @override
    def around_update(self, parts: Parts) -> Parts:
        def step(final: Parts, training: TrainContext, number: int, micro_batches: Any) -> Stepped:
            training.begin_step(number)
            return parts.step(final, training, number, micro_batches)

        return parts._replace(step=step)

"""Tasks that compare all samples of a global batch (`pipeline.tasks.gathered`)."""

from typing import Any, Self

from torch import Tensor
from typing_extensions import override

from pipeline.tasks import StepOutput
from pipeline.tasks.gathering import Pass
from pipeline.training.context import TrainContext
from pipeline.training.feature import Feature
from pipeline.training.global_batch import training_pass
from pipeline.training.order import MicroBatch
from pipeline.training.step.plain import Parts


class Gathering(Feature):
    """Pass around each forward computation, by which `gathered` knows the global batch."""

    def __init__(self, training: TrainContext) -> None:
        self._training = training
        self._pass: Pass | None = None

    @override
    @classmethod
    def of(cls, training: TrainContext) -> Self | None:
        return cls(training) if not training.experiment.optimizers else None

    @override
    def around_gradients(self, parts: Parts) -> Parts:
        training = self._training
        if (
            training.seen.log_names is not None and not training.seen.gathers
        ):  # the first batch of training has shown it
            return parts

        def forward(micro_batch: MicroBatch, batch: Any) -> StepOutput:
            self._pass = training_pass(training, micro_batch, exchange=parts.exchanges)
            with self._pass:
                return parts.forward(micro_batch, batch)

        def weigh(micro_batch: MicroBatch, output: StepOutput) -> tuple[Tensor, Any]:
            assert self._pass is not None
            loss, share = parts.weigh(micro_batch, output)
            return self._pass.reaching_rows(loss), share

        return parts._replace(forward=forward, weigh=weigh)

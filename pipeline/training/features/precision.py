"""Mixed precision (``train.precision``): autocast around the task, and the loss scale of fp16."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from torch import Tensor
from typing_extensions import override

from pipeline.tasks import StepOutput
from pipeline.training.batches.order import MicroBatch
from pipeline.training.context import DTYPES, TrainContext
from pipeline.training.feature import Feature, Saved
from pipeline.training.model.parameter_set import ParameterSet
from pipeline.training.step.plain import Parts, Stepped


class Autocast(Feature):
    """Autocast of the forward pass. Sharded strategies cast by themselves."""

    def __init__(self, training: TrainContext) -> None:
        self._training = training

    @override
    @classmethod
    def of(cls, training: TrainContext) -> Self | None:
        has_own = training.sharded is not None or training.experiment.optimizers
        return cls(training) if training.experiment.train.precision in DTYPES and not has_own else None

    @override
    def around_gradients(self, parts: Parts) -> Parts:
        def forward(micro_batch: MicroBatch, batch: Any) -> StepOutput:
            with self._training.autocast():
                return parts.forward(micro_batch, batch)

        return parts._replace(forward=forward)


class Scaled(Feature):
    """Scaling of the loss, so that small fp16 gradients don't vanish; the optimizer leaves out steps that overflow."""

    name: ClassVar[str] = "scaler"

    def __init__(self, training: TrainContext) -> None:
        self._training = training

    @override
    @classmethod
    def of(cls, training: TrainContext) -> Self | None:
        return cls(training) if training.scaler.is_enabled() else None

    @override
    def around_gradients(self, parts: Parts) -> Parts:
        def backward(loss: Tensor) -> None:
            parts.backward(self._training.scaler.scale(loss))

        return parts._replace(backward=backward)

    @override
    def around_update(self, parts: Parts) -> Parts:
        def update(_: int, parameter_set: ParameterSet) -> bool:
            self._training.scaler.step(parameter_set.optimizer)
            parameter_set.clear()
            return True

        def step(final: Parts, training: TrainContext, number: int, micro_batches: Any) -> Stepped:
            stepped = parts.step(final, training, number, micro_batches)
            if stepped.has_updated:
                self._training.scaler.update()
            return stepped

        return parts._replace(update=update, step=step)

    @override
    def state_dict(self) -> Mapping[str, Any]:
        return self._training.scaler.state_dict()

    @override
    def load_state_dict(self, state: Mapping[str, Any] | None, *, saved: Saved) -> None:
        if state:  # else saved with another precision
            self._training.scaler.load_state_dict(dict(state))

"""Transformation of whole batches, such as MixUp and CutMix (``train.batch_transform``)."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from pipeline.errors import ExperimentError
from pipeline.tasks import StepOutput
from pipeline.tasks.from_model import described
from pipeline.training.batches.order import MicroBatch
from pipeline.training.context import TrainContext
from pipeline.training.feature import Feature
from pipeline.training.step.plain import Parts
from pipeline.wording import counted

KEY = "train.batch_transform"


class BatchTransform(Feature):
    """Transformation of each micro-batch before its forward pass, with random numbers from the micro-batch's seed."""

    def __init__(self, training: TrainContext, transform: Callable[[Any, Any], Any]) -> None:
        self._training = training
        self._transform = transform.to(training.device) if isinstance(transform, nn.Module) else transform

    @override
    @classmethod
    def of(cls, training: TrainContext) -> Self | None:
        component = training.experiment.train.batch_transform
        if component is None:
            return None
        transform = training.create(component, key=KEY)
        if not callable(transform):
            message = f"{component.target} returned a {type(transform).__name__}, which can't be called"
            raise ExperimentError.of(KEY, f"{message}; return a function of inputs and targets")
        return cls(training, transform)

    @override
    def around_gradients(self, parts: Parts) -> Parts:
        def forward(micro_batch: MicroBatch, batch: Any) -> StepOutput:
            pair = _pair(batch, "a batch", remedy="remove this key, or transform the samples in loader.collate")
            inputs, targets = self._training.batches.placed(pair)
            transformed = _pair(self._call_transform(inputs, targets), "the returned value", remedy="return both")
            _check_inputs(inputs, transformed[0])
            output = parts.forward(micro_batch, transformed)
            return output._replace(targets=_labels(output.targets, targets))

        return parts._replace(forward=forward)

    def _call_transform(self, inputs: Any, targets: Any) -> Any:
        try:
            return self._transform(inputs, targets)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            said = " ".join(str(error).split())[:300]
            raise ExperimentError.of(KEY, f"raised {type(error).__name__}: {said}") from error


def _pair(value: Any, what: str, *, remedy: str) -> tuple[Any, Any]:
    if isinstance(value, tuple | list) and len(value) == 2:
        return value[0], value[1]
    raise ExperimentError.of(KEY, f"{what} is {described(value)}, not (inputs, targets); {remedy}")


def _check_inputs(inputs: Any, transformed: Any) -> None:
    """Refuse another type, and another number of samples, by which the losses of micro-batches are weighted."""
    if not isinstance(inputs, Tensor):
        return
    if not isinstance(transformed, Tensor):
        raise ExperimentError.of(KEY, f"the returned inputs are {described(transformed)}; return a tensor")
    if len(inputs) != len(transformed):
        message = f"returned {len(transformed)} of {counted(len(inputs), 'sample')}; return as many samples as it gets"
        raise ExperimentError.of(KEY, message)


def _labels(targets: Any, before: Any) -> Any:
    """Return targets for metrics: where labels became class probabilities, the class with the largest part."""
    if not (isinstance(targets, Tensor) and isinstance(before, Tensor)):
        return targets
    is_mixed = targets.is_floating_point() and not before.is_floating_point() and targets.ndim == before.ndim + 1
    return targets.argmax(1) if is_mixed else targets

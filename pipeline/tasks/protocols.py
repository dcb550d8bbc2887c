"""Protocols of tasks, and the result that a task returns for a batch."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn


class StepOutput(NamedTuple):
    """Result of a task for one batch."""

    loss: Tensor
    """Scalar: mean over the batch."""
    outputs: Any
    """First argument of the metrics."""
    targets: Any
    """Second argument of the metrics."""
    weight: Tensor | None = None
    """Scalar: number of items in the mean, e.g. boxes or tokens without padding. None: the number of samples.

    The loss of a step is the mean over all workers and micro-batches, weighted by this number. A loss with weight 0 is
    skipped, even if it is NaN.
    """
    logs: Mapping[str, Tensor] = MappingProxyType({})
    """Scalars to report in addition to the loss, e.g. its terms: means over the batch, averaged with ``weight``.

    ``kl`` is reported as train/kl for each step and as validation/kl. Return the same names for every batch of
    training, and for every batch of an evaluation.
    """
    optimizer: str | None = None
    """Name of the optimizer that minimizes this loss, if the experiment has several (``optimizers``)."""


class Task(Protocol):
    """Computation of the loss of one batch, in training and in evaluation."""

    def __call__(self, model: nn.Module, batch: Any) -> StepOutput | Iterator[StepOutput]:
        """Compute the loss of a batch, which is the result of collate_fn on the model's device.

        With several optimizers, yield a loss for each optimizer; the code after a yield runs after the optimizer's
        step. A task may also have a method ``pictures(model) -> Mapping[str, Tensor]``, called after each evaluation.
        It returns images by name, of shape (images, channels, height, width) with values from 0 to 1. They are logged
        as samples/NAME-STEP.png.
        """


@runtime_checkable
class InSteps(Protocol):
    """Task that depends on the number of steps or epochs done, e.g. to warm up a loss term."""

    def begin_step(self, step: int, *, epoch: int, batch: int) -> None:
        """Start an optimizer step.

        Args:
            step: optimizer steps done before.
            epoch: epochs done before.
            batch: batches of this epoch that this rank has done.
        """


@runtime_checkable
class OwnEvaluation(Protocol):
    """Task whose evaluation differs from its training, with other logs."""

    def own_evaluation(self, split: str) -> AbstractContextManager[Mapping[str, str]]:
        """Return a context in which calls evaluate a split: validation or test.

        It yields a mapping from the name to report to the path of a metric in the model that the calls update.
        """

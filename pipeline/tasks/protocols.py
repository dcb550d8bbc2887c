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
    """Scalar: divisor of the loss, e.g. the number of boxes or of tokens without padding; None: the number of samples.

    The loss of a step is the mean of its losses, weighted by this, over all workers and micro-batches. A loss with
    weight 0 is left out, even if it is NaN.
    """
    logs: Mapping[str, Tensor] = MappingProxyType({})
    """Scalars to report besides the loss, e.g. its terms: means over the batch, averaged with the loss's weight.

    ``kl`` is reported as train/kl for each step and as validation/kl. Names are the same for every batch of training,
    and for every batch of an evaluation, whose logs must be means.
    """
    optimizer: str | None = None
    """Name of the optimizer that this loss is for, if the experiment has several (``optimizers``)."""
    state: Any = None
    """State at the end of the batch that a `Stateful` task gets with the next one; with its graph, which is cut."""


class Task(Protocol):
    """Computation of the loss of one batch, in training and in evaluation."""

    def __call__(self, model: nn.Module, batch: Any) -> StepOutput | Iterator[StepOutput]:
        """Compute the loss of a batch, which is collate_fn's result on the model's device.

        With several optimizers it yields a loss for each, and runs on after the optimizer's step. It may also have a
        method ``pictures(model) -> Mapping[str, Tensor]``, called after each evaluation: images of values from 0 to 1
        by name, shape (images, channels, height, width), which are logged as samples/NAME-STEP.png.
        """


@runtime_checkable
class InSteps(Protocol):
    """Task that depends on the place in the training, e.g. for a weight of a term that grows."""

    def begin_step(self, step: int, *, epoch: int, batch: int) -> None:
        """Begin an optimizer step: steps and epochs done before, and this rank's batches of the epoch."""


@runtime_checkable
class OwnEvaluation(Protocol):
    """Task that evaluates in another way than it trains, with other logs."""

    def own_evaluation(self, split: str) -> AbstractContextManager[Mapping[str, str]]:
        """Return a context in which calls evaluate a split: validation or test.

        It yields the paths in the model of metrics that the calls update, by the name to report.
        """


class Stateful(Protocol):
    """Task that carries a state from batch to batch: truncated backpropagation through time.

    Any task with ``batch_dim`` is one. It needs ``order: {contiguous: true}``, by which each row of a batch continues
    that row of the batch before (docs/sequences.md).
    """

    batch_dim: int
    """Dimension of the state's tensors that counts the rows of a batch: 1 for torch's LSTM, GRU and RNN."""

    def __call__(self, model: nn.Module, batch: Any, state: Any = None) -> StepOutput:
        """Compute the loss of a batch, with `StepOutput.state`: a tensor, or tuples, lists and dicts of tensors.

        ``state`` is that of the batch before, detached; None where the rows begin.
        """

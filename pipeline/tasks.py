"""What one training step computes from a batch: by default ``loss(model(inputs), targets)``.

An experiment whose batches are something else names its own class in ``task:``. It calls ``model`` itself, so that
whatever the strategy wrapped around it takes part.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from pipeline.errors import ExperimentError

_HINT = "return pairs from the dataset, or write a `task:` that reads this batch"
_MEAN_REDUCTIONS = ("mean", "batchmean")  # batchmean is KLDivLoss's mean over samples


class StepOutput(NamedTuple):
    """What a step hands to the training loop."""

    loss: Tensor
    """Scalar, the mean over the samples of the batch: batches are weighted by their number of samples."""
    outputs: Any
    """First argument of the metrics."""
    targets: Any
    """Second argument of the metrics."""


class Task(Protocol):
    """Computes the loss of one batch, in training and in evaluation."""

    def __call__(self, model: nn.Module, batch: Any) -> StepOutput:
        """The batch is as collate_fn made it, on the model's device."""


class Supervised(Task):
    """``loss(model(inputs), targets)`` for batches of (inputs, targets).

    An output with ``logits``, as transformers' models return it, counts as its logits.

    Raises:
        ExperimentError: the loss isn't a mean over the batch, or a batch isn't a pair.
    """

    def __init__(self, loss: Callable[[Any, Any], Tensor]) -> None:
        reduction = getattr(loss, "reduction", "mean")
        if reduction not in _MEAN_REDUCTIONS:
            message = f"reduction {reduction!r} depends on the batch size; use reduction: mean"
            raise ExperimentError.of("loss", message)
        self.loss = loss

    @override
    def __call__(self, model: nn.Module, batch: Any) -> StepOutput:
        """See `Task`."""
        inputs, targets = _pair(batch)
        outputs = _logits(model(inputs))
        loss = self.loss(outputs, targets)
        if not isinstance(loss, Tensor) or loss.ndim:
            raise ExperimentError.of("loss", f"is {_describe(loss)}, not a scalar; return the mean over the batch")
        return StepOutput(loss, outputs, targets)


class LanguageModel(Task):
    """Cross entropy of each next token, for batches of (tokens, next_tokens), both (batch, time).

    Metrics see logits (batch * time, vocabulary) and tokens (batch * time).

    Raises:
        ExperimentError: a batch isn't a pair.
    """

    @override
    def __call__(self, model: nn.Module, batch: Any) -> StepOutput:
        """See `Task`."""
        tokens, next_tokens = _pair(batch)
        logits = _logits(model(tokens)).flatten(0, 1)
        targets = next_tokens.flatten()
        return StepOutput(functional.cross_entropy(logits, targets), logits, targets)


def _pair(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, tuple | list):
        raise ExperimentError.of("data", f"a batch is {_describe(batch)}, not (inputs, targets); {_HINT}")
    if len(batch) != 2:
        raise ExperimentError.of("data", f"a batch has {len(batch)} parts, not (inputs, targets); {_HINT}")
    return batch[0], batch[1]


def _logits(outputs: Any) -> Any:
    return getattr(outputs, "logits", outputs)


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a mapping with the keys {', '.join(map(str, value))}"
    return f"of type {type(value).__name__}"

"""What one training step computes from a batch: by default ``loss(model(inputs), targets)``.

An experiment whose batches are something else names its own class in ``task:``. It calls ``model`` itself, so that
whatever the strategy wrapped around it takes part.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from pipeline.errors import ExperimentError

_HINT = "return pairs from the dataset, or write a `task:` that reads this batch"
_MEAN_REDUCTIONS = ("mean", "batchmean")  # batchmean is KLDivLoss's mean over samples
_IGNORED = -100
"""torch's ``ignore_index`` unless one is given."""


class StepOutput(NamedTuple):
    """What a step hands to the training loop."""

    loss: Tensor
    """Scalar, a mean over the batch."""
    outputs: Any
    """First argument of the metrics."""
    targets: Any
    """Second argument of the metrics."""
    weight: Tensor | None = None
    """What the loss was divided by, scalar: the number of boxes, or of tokens that aren't padding; None: of samples.

    The loss of a step is the sum of losses times weights over the sum of weights, all workers and micro-batches taken
    together. A loss with a weight of 0 counts nothing, even if it is NaN.
    """


class Task(Protocol):
    """Computes the loss of one batch, in training and in evaluation."""

    def __call__(self, model: nn.Module, batch: Any) -> StepOutput:
        """The batch is as collate_fn made it, on the model's device."""


class Supervised(Task):
    """``loss(model(inputs), targets)`` for batches of (inputs, targets).

    An output with ``logits``, as transformers' models return it, counts as its logits. torch's cross entropies are
    divided by the (weighted) number of targets that aren't ignored, which is their weight.

    Raises:
        ExperimentError: the loss isn't a mean over the batch, or a batch isn't a pair.
    """

    def __init__(self, loss: Callable[[Any, Any], Tensor], *, ignores: bool = False) -> None:
        """``ignores`` tells that targets may be the loss's ``ignore_index``, also where it is torch's default."""
        reduction = getattr(loss, "reduction", "mean")
        if reduction not in _MEAN_REDUCTIONS:
            message = f"reduction {reduction!r} depends on the batch size; use reduction: mean"
            raise ExperimentError.of("loss", message)
        self.loss = loss
        self._entropy = loss if _is_entropy(loss) else None
        self._leaves_out = self._entropy is not None and _has_zero(self._entropy.weight)
        if self._leaves_out and getattr(loss, "label_smoothing", 0.0) != 0.0:
            message = "label_smoothing with a weight of 0 divides a batch of that class alone by 0; write 1e-6"
            raise ExperimentError.of("loss", message)
        entropy = self._entropy
        self._weighs_by_targets = entropy is not None and (
            ignores or entropy.weight is not None or entropy.ignore_index != _IGNORED
        )

    @override
    def __call__(self, model: nn.Module, batch: Any) -> StepOutput:
        """See `Task`."""
        inputs, targets = _pair(batch)
        outputs = _logits(model(inputs))
        loss = self.loss(outputs, self._counted(targets))
        if not isinstance(loss, Tensor) or loss.ndim:
            raise ExperimentError.of("loss", f"is {_describe(loss)}, not a scalar; return the mean over the batch")
        return StepOutput(loss, outputs, targets, self._weight(targets))

    def refuse_ignored(self, batch: Any) -> None:
        """Look for targets that the loss ignores where it is weighted by samples; before they are on a device.

        Raises:
            ExperimentError: there are some.
        """
        if self._entropy is None or self._weighs_by_targets or not isinstance(batch, tuple | list) or len(batch) != 2:
            return
        targets = batch[1]
        # Labels aren't negative, and the smallest is found in a third of the time that a comparison takes.
        if isinstance(targets, Tensor) and targets.ndim == 1 and len(targets) and int(targets.min()) == _IGNORED:
            message = (
                f"some targets are {_IGNORED}, which it ignores; write ignore_index: {_IGNORED} to divide by the others"
            )
            raise ExperimentError.of("loss", message)

    def _counted(self, targets: Any) -> Any:
        """The targets, those of classes whose weight is 0 ignored: of a batch of them alone gradients would be NaN."""
        entropy = self._entropy
        if entropy is None or not self._leaves_out or targets.is_floating_point():
            return targets
        return torch.where(_weights(entropy, targets) == 0, entropy.ignore_index, targets)

    def _weight(self, targets: Tensor) -> Tensor | None:
        """What torch's cross entropies divide by; None for other losses, and where that is the number of samples."""
        entropy = self._entropy
        if entropy is None or targets.is_floating_point():  # of probabilities it is a mean over the samples
            return None
        if entropy.weight is not None:
            return _weights(entropy, targets).sum()
        if targets.ndim > 1 or self._weighs_by_targets:
            return (targets != entropy.ignore_index).sum()
        return None


class LanguageModel(Task):
    """Cross entropy of each next token, for batches of (tokens, next_tokens), both (batch, time).

    Targets of -100 are padding. Metrics see logits (batch * time, vocabulary) and tokens (batch * time).

    Raises:
        ExperimentError: a batch isn't a pair.
    """

    @override
    def __call__(self, model: nn.Module, batch: Any) -> StepOutput:
        """See `Task`."""
        tokens, next_tokens = _pair(batch)
        logits = _logits(model(tokens)).flatten(0, 1)
        targets = next_tokens.flatten()
        loss = functional.cross_entropy(logits, targets, ignore_index=_IGNORED)
        return StepOutput(loss, logits, targets, (targets != _IGNORED).sum())


def is_known(task: object) -> bool:
    """Whether a task's loss is one of torch's own, which for samples of one size are what they are taken for."""
    if isinstance(task, Supervised):
        return _is_entropy(task.loss) or type(task.loss).__module__ == "torch.nn.modules.loss"
    return isinstance(task, LanguageModel)


def _is_entropy(loss: object) -> TypeGuard[nn.CrossEntropyLoss | nn.NLLLoss]:
    """Whether it computes what torch's cross entropies do; a subclass may compute something else."""
    return getattr(type(loss), "forward", None) in (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)


def _has_zero(weight: Tensor | None) -> bool:
    return weight is not None and bool((weight == 0).any())


def _weights(entropy: nn.CrossEntropyLoss | nn.NLLLoss, targets: Tensor) -> Tensor:
    """Each target's weight, that of its class; 0 if it is ignored."""
    counts = targets != entropy.ignore_index
    assert entropy.weight is not None
    return entropy.weight[torch.where(counts, targets, 0)] * counts


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

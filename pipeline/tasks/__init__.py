"""Tasks: the computation of the loss from a batch, by default ``loss(model(inputs), targets)``.

An experiment with other batches names its own class in ``task:``. A task calls ``model`` itself, so that the wrapper of
the parallel strategy takes part.
"""

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from pipeline.errors import ExperimentError
from pipeline.tasks.from_model import IGNORED, FromModel, described
from pipeline.tasks.gathering import gathered
from pipeline.tasks.lightning import Lightning
from pipeline.tasks.protocols import InSteps, OwnEvaluation, StepOutput, Task

__all__ = [
    "FromModel",
    "InSteps",
    "LanguageModel",
    "Lightning",
    "OwnEvaluation",
    "StepOutput",
    "Supervised",
    "Task",
    "gathered",
    "is_known",
]

_HINT = "return pairs from the dataset, or set `task:` to a class that reads such batches"
_WEIGHTED = (nn.CrossEntropyLoss, nn.NLLLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.MultiMarginLoss)
_MEAN_REDUCTIONS = ("mean", "batchmean")  # batchmean is KLDivLoss's mean over samples


class Supervised(Task):
    """``loss(model(inputs), targets)`` for batches of (inputs, targets).

    If the output has ``logits``, as outputs of transformers models do, the loss gets only the logits. torch's cross
    entropies are weighted by the number of targets that are not ignored, or by the sum of the targets' class weights.

    Raises:
        ExperimentError: the loss isn't a mean over the batch, or a batch isn't a pair.
    """

    def __init__(self, loss: Callable[[Any, Any], Tensor], *, ignores: bool = False) -> None:
        """Wrap a loss.

        Args:
            loss: function of outputs and targets that returns the mean over the batch.
            ignores: True if targets may equal the ``ignore_index`` of the loss, even torch's default of -100.
        """
        reduction = getattr(loss, "reduction", "mean")
        if reduction not in _MEAN_REDUCTIONS:
            message = f"reduction {reduction!r} depends on the batch size; set reduction: mean"
            raise ExperimentError.of("loss", message)
        self.loss = loss
        self._entropy = loss if _is_entropy(loss) else None
        self._leaves_out = self._entropy is not None and _has_zero(self._entropy.weight)
        if self._leaves_out and getattr(loss, "label_smoothing", 0.0) != 0.0:
            message = (
                "label_smoothing with a class weight of 0 divides by 0 if a batch has only that class. Set the weight "
                "to 1e-6."
            )
            raise ExperimentError.of("loss", message)
        entropy = self._entropy
        self._weighs_by_targets = entropy is not None and (
            ignores or entropy.weight is not None or entropy.ignore_index != IGNORED
        )

    @override
    def __call__(self, model: nn.Module, batch: Any) -> StepOutput:
        """Compute the loss of (inputs, targets)."""
        inputs, targets = _pair(batch)
        outputs = _logits(model(inputs))
        if isinstance(self.loss, _WEIGHTED):
            _match_weights(self.loss, outputs)
        loss = self.loss(outputs, self._counted(targets) if self._leaves_out else targets)
        if not isinstance(loss, Tensor) or loss.ndim:
            raise ExperimentError.of("loss", f"is {described(loss)}, not a scalar; return the mean over the batch")
        return StepOutput(loss, outputs, targets, None if self._entropy is None else self._weight(targets))

    def refuse_ignored(self, batch: Any) -> None:
        """Check a batch on the CPU for ignored targets if the loss is weighted by samples.

        Raises:
            ExperimentError: a target is ignored.
        """
        if self._entropy is None or self._weighs_by_targets or not isinstance(batch, tuple | list) or len(batch) != 2:
            return
        targets = batch[1]
        # No other label is negative, and a minimum takes a third of the time of a comparison.
        if isinstance(targets, Tensor) and targets.ndim == 1 and len(targets) and int(targets.min()) == IGNORED:
            message = (
                f"some targets are {IGNORED}, which the loss ignores. Set ignore_index: {IGNORED}, so that the loss is "
                "divided by the number of the other targets."
            )
            raise ExperimentError.of("loss", message)

    def _counted(self, targets: Any) -> Any:
        """Ignore targets of classes with weight 0; the gradients of a batch of nothing else would be NaN."""
        entropy = self._entropy
        if entropy is None or not self._leaves_out or targets.is_floating_point():
            return targets
        return torch.where(_weights(entropy, targets) == 0, entropy.ignore_index, targets)

    def _weight(self, targets: Tensor) -> Tensor | None:
        """Return the divisor of torch's cross entropies; None for other losses, and if it is the number of samples."""
        entropy = self._entropy
        if entropy is None:
            return None
        if targets.is_floating_point():  # class probabilities, for which torch divides by all items, even with weights
            is_weighed = self._weighs_by_targets or targets.ndim > 2
            return torch.tensor(targets.numel() // targets.shape[1]) if is_weighed else None
        if entropy.weight is not None:
            return _weights(entropy, targets).sum()
        if targets.ndim > 1 or self._weighs_by_targets:
            return (targets != entropy.ignore_index).sum()
        return None


class LanguageModel(Task):
    """Cross entropy of each next token, for batches of (tokens, next_tokens).

    Both are int64 of shape (batch, time). Targets of -100 are padding. Metrics get logits (batch * time, vocabulary)
    and tokens (batch * time).

    Raises:
        ExperimentError: a batch isn't a pair.
    """

    @override
    def __call__(self, model: nn.Module, batch: Any) -> StepOutput:
        """Compute the loss of (tokens, next_tokens)."""
        tokens, next_tokens = _pair(batch)
        logits = _logits(model(tokens)).flatten(0, 1)
        targets = next_tokens.flatten()
        loss = functional.cross_entropy(logits, targets, ignore_index=IGNORED)
        return StepOutput(loss, logits, targets, (targets != IGNORED).sum())


def is_known(task: object) -> bool:
    """Return True if a task's loss is torch's own, which needs no check of being a mean over the samples."""
    if isinstance(task, Supervised):
        return _is_entropy(task.loss) or type(task.loss).__module__ == "torch.nn.modules.loss"
    return isinstance(task, LanguageModel)


def _is_entropy(loss: object) -> TypeGuard[nn.CrossEntropyLoss | nn.NLLLoss]:
    """Return True if a loss computes torch's cross entropy; a subclass may compute something else."""
    return getattr(type(loss), "forward", None) in (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)


def _match_weights(loss: nn.Module, outputs: Any) -> None:
    """Give the weights of a torch loss the type that it needs, so that a file or class may have integers or doubles."""
    if not isinstance(outputs, Tensor):
        return
    needed = torch.float64 if outputs.dtype == torch.float64 else torch.float32
    for name, weight in loss._buffers.items():
        if weight is not None and weight.dtype != needed:
            loss._buffers[name] = weight.to(needed)


def _has_zero(weight: Tensor | None) -> bool:
    return weight is not None and bool((weight == 0).any())


def _weights(entropy: nn.CrossEntropyLoss | nn.NLLLoss, targets: Tensor) -> Tensor:
    """Return the class weight of each target, 0 for ignored ones."""
    counts = targets != entropy.ignore_index
    assert entropy.weight is not None
    return entropy.weight[torch.where(counts, targets, 0)] * counts


def _pair(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, tuple | list):
        raise ExperimentError.of("data", f"a batch is {described(batch)}, not (inputs, targets); {_HINT}")
    if len(batch) != 2:
        raise ExperimentError.of("data", f"a batch has {len(batch)} parts, not (inputs, targets); {_HINT}")
    return batch[0], batch[1]


def _logits(outputs: Any) -> Any:
    return getattr(outputs, "logits", outputs)

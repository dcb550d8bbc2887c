"""The tasks of (inputs, targets): any loss of torch or of a user, cross entropy, and a loss that the model computes."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from pipeline.errors import ExperimentError
from pipeline.tasks.trainee import AsModule, Loss, Task, count_samples, describe

IGNORED = -100  # Default ``ignore_index`` of torch's losses
_HINT = "return pairs from the dataset, or set `task:` to a class that reads such batches"
_WEIGHTED = (nn.CrossEntropyLoss, nn.NLLLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.MultiMarginLoss)
_MEAN_REDUCTIONS = ("mean", "batchmean")  # batchmean is KLDivLoss's mean over samples
_SILENT = (nn.PoissonNLLLoss, nn.KLDivLoss, nn.SoftMarginLoss, nn.HingeEmbeddingLoss)
"""Losses that broadcast targets of another shape without a warning, which is an error in the first step."""


class Supervised(nn.Module, Task):
    """``loss(model(inputs), targets)`` for batches of (inputs, targets).

    If the output has ``logits``, as outputs of transformers models do, the loss gets only the logits. torch's cross
    entropies are divided by the number of targets that are not ignored, or by the sum of the targets' class weights.
    Any other loss is the mean over the samples.

    Raises:
        ExperimentError: the loss isn't a mean over the batch, or a batch isn't a pair.
    """

    error_key = "loss"  # Key of the experiment that errors name

    def __init__(self, loss: Callable[[Any, Any], Tensor], *, ignores: bool = False) -> None:
        """Wrap a loss.

        Args:
            loss: function of outputs and targets that returns the mean over the batch.
            ignores: True if targets may equal the ``ignore_index`` of the loss, even torch's default of -100.
        """
        super().__init__()
        reduction = getattr(loss, "reduction", "mean")
        if reduction not in _MEAN_REDUCTIONS:
            message = f"reduction {reduction!r} depends on the batch size; set reduction: mean"
            raise ExperimentError.of("loss", message)
        self.loss = loss if isinstance(loss, nn.Module) else AsModule(loss)
        # A subclass of torch's cross entropies may compute something else.
        self._is_entropy = getattr(type(loss), "forward", None) in (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)
        self.is_known = self._is_entropy or type(loss).__module__ == "torch.nn.modules.loss"
        """True if the loss is torch's own, which needs no check of being a mean over the samples."""
        for name, weight in self.loss._buffers.items() if isinstance(loss, _WEIGHTED) else ():
            if weight is not None:  # a file or class may have integers or doubles
                self.loss._buffers[name] = weight.to(torch.get_default_dtype())
        self._checked: set[bool] = set()  # modes whose first batch was checked
        if not self._is_entropy:
            return
        entropy: Any = loss
        weight = entropy.weight
        self._counts_targets = ignores or weight is not None or entropy.ignore_index != IGNORED
        entropy.reduction = "sum"

    @override
    def forward(self, model: nn.Module, batch: Any) -> Loss:
        """Compute the loss of (inputs, targets)."""
        inputs, targets = _pair(batch)
        outputs = _logits(model(inputs))
        if self.training not in self._checked:
            self._check(outputs, targets)
        loss = self.loss(outputs, targets)
        if not isinstance(loss, Tensor) or loss.ndim:
            raise ExperimentError.of("loss", f"is {describe(loss)}, not a scalar; return the mean over the batch")
        if self._is_entropy:
            return Loss(loss, self._count(targets), outputs, targets)
        return Loss(loss * count_samples(batch), None, outputs, targets)

    def _count(self, targets: Tensor) -> Tensor | None:
        """Return the divisor of torch's mean; None if it is the number of samples."""
        if targets.is_floating_point():  # class probabilities, for which torch divides by all items, even with weights
            return targets.new_full((), targets.numel() // targets.shape[1]) if targets.ndim > 2 else None
        if targets.ndim < 2 and not self._counts_targets:
            return None
        entropy: Any = self.loss
        weight, counted = entropy.weight, targets.ne(entropy.ignore_index)
        return counted.sum() if weight is None else (weight[torch.where(counted, targets, 0)] * counted).sum()

    def _check(self, outputs: Any, targets: Any) -> None:
        """Check the first batch for ignored targets that are not left out of the count, and for broadcast shapes."""
        self._checked.add(self.training)
        if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
            return
        is_counted = not self._is_entropy or self._counts_targets or targets.ndim != 1 or not len(targets)
        if not is_counted and int(targets.min()) == IGNORED:  # no other label is negative
            raise ExperimentError.of(
                "loss",
                f"some targets are {IGNORED}, which the loss ignores. Set ignore_index: {IGNORED}, so that the loss is "
                "divided by the number of the other targets.",
            )
        if type(self.loss) in _SILENT and outputs.shape != targets.shape and max(outputs.numel(), targets.numel()) > 1:
            given = f"{describe_shape('outputs', outputs)} and {describe_shape('targets', targets)}"
            remedy = remedy_of_shapes(tuple(outputs.shape), tuple(targets.shape))
            raise ExperimentError.of("loss", f"gets {given}; {remedy}")


class LanguageModel(Task):
    """Cross entropy of each next token, for batches of (tokens, next_tokens).

    Both are int64 of shape (batch, time). Targets of -100 are padding. Metrics get logits (batch * time, vocabulary)
    and tokens (batch * time).

    Raises:
        ExperimentError: a batch isn't a pair.
    """

    @override
    def __call__(self, model: nn.Module, batch: Any) -> Loss:
        """Compute the loss of (tokens, next_tokens)."""
        tokens, next_tokens = _pair(batch)
        logits = _logits(model(tokens)).flatten(0, 1)
        targets = next_tokens.flatten()
        loss = functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
        return Loss(loss, (targets != IGNORED).sum(), logits, targets)


def remedy_of_shapes(outputs: tuple[int, ...], targets: tuple[int, ...]) -> str:
    """Return what to write where outputs and targets should have one shape."""
    if outputs == (*targets, 1):
        return "return targets.unsqueeze(-1) from the dataset, or outputs.squeeze(-1) from the model"
    if targets == (*outputs, 1):
        return "return targets.squeeze(-1) from the dataset, or outputs.unsqueeze(-1) from the model"
    return "give both the same shape"


def describe_shape(name: str, tensor: Tensor) -> str:
    """Return name, shape and type of a tensor, for messages."""
    return f"{name} of shape {tuple(tensor.shape)} ({str(tensor.dtype).removeprefix('torch.')})"


def _pair(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise ExperimentError.of("data", f"a batch is {describe(batch)}, not (inputs, targets); {_HINT}")
    return batch[0], batch[1]


def _logits(outputs: Any) -> Any:
    return getattr(outputs, "logits", outputs)


_CLOSE = 1e-5
_SHIFTED = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


class FromModel(Task):
    """``model(**batch).loss``, for models that compute their loss and mappings as batches.

    transformers models compute a loss from ``labels``: the mean over the labels other than -100. Without labels, or
    with floating-point labels, it is the mean over the samples. Metrics get logits and labels. For sequences their
    shapes are (batch * time, classes) and (batch * time), including labels of -100.
    """

    def __init__(self, *, labels: str = "labels", shifted: bool | None = None) -> None:
        """Set the key of the labels in a batch.

        Args:
            labels: key of the labels. The other keys are the inputs of the model.
            shifted: True if the model compares each output with the next label, so that the first label is not used.
                None: True for decoder-only models of transformers, which have ForCausalLM, LMHeadModel or
                ForConditionalGeneration in the name of the class.
        """
        self.labels = labels
        self._shifted = shifted
        self._checked = set[bool]()  # a set, as a number that changes is taken for state

    @override
    def __call__(self, model: nn.Module, batch: Any) -> Loss:
        """Compute the loss of a mapping."""
        if not isinstance(batch, Mapping):
            message = f"a batch is {describe(batch)}, not a mapping. Return mappings such as {{input_ids: ..., "
            raise ExperimentError.of("data", f"{message}{self.labels}: ...}} from the dataset.")
        outputs = model(**batch)
        loss = _field(outputs, "loss")
        if not isinstance(loss, Tensor):
            returned = ", ".join(outputs) if isinstance(outputs, Mapping) else describe(outputs)
            lacks = "" if self.labels in batch else f", which has no {self.labels}"
            message = f"the model returned no loss, but {returned}, for a batch of {', '.join(batch)}{lacks}. Use a "
            remedy = "model whose head computes the loss from labels, see task of pipeline.models.pretrained."
            raise ExperimentError.of("task", f"{message}{remedy}")
        logits, labels = _field(outputs, "logits"), batch.get(self.labels)
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return Loss(loss * count_samples(batch), None, outputs if logits is None else logits, labels)
        is_sequence = logits is not None and labels.ndim > 1 and logits.shape[:-1] == labels.shape
        shifted = labels.ndim > 1 and (_shifts(model) if self._shifted is None else self._shifted)
        if is_sequence and not self._checked:
            self._check(loss, logits, labels, shifted=shifted)
        if shifted:
            labels = labels[..., 1:]
            logits = logits[..., :-1, :] if logits is not None else None
        count = (labels != IGNORED).sum()
        if is_sequence:
            logits, labels = logits.flatten(0, -2), labels.flatten()
        total = torch.where(count > 0, loss, 0.0) * count  # the mean over nothing is NaN
        return Loss(total, count, outputs if logits is None else logits, labels)

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the inputs of a batch: all tensors but the labels."""
        return {name: one for name, one in batch.items() if name != self.labels and isinstance(one, Tensor)}

    def _check(self, loss: Tensor, logits: Tensor, labels: Tensor, *, shifted: bool) -> None:
        """Refuse a mean over other labels than the counted ones; a loss that is neither mean can't be checked."""
        loss = loss.detach().float()
        own, other = (_cross_entropy(logits, labels, shifted=each) for each in (shifted, not shifted))
        self._checked |= {True} if own.isfinite() and other.isfinite() else set()
        if not torch.isclose(own, loss, rtol=_CLOSE) and torch.isclose(other, loss, rtol=_CLOSE):
            which = "the same label" if shifted else "the next label"
            message = f"the model compares each output with {which}, so the count of the loss is wrong"
            raise ExperimentError.of("task.shifted", f"{message}; set shifted: {str(not shifted).lower()}")


def _field(outputs: Any, name: str) -> Any:
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)


@torch.no_grad()
def _cross_entropy(logits: Tensor, labels: Tensor, *, shifted: bool) -> Tensor:
    if shifted:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    return functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED)


def _shifts(model: nn.Module) -> bool:
    """Return True if the class of a transformers model compares each output with the next label."""
    inner = next((one for one in model.modules() if hasattr(one, "config")), None)
    is_decoder = inner is not None and not getattr(inner.config, "is_encoder_decoder", False)
    return is_decoder and any(part in type(inner).__name__ for part in _SHIFTED)

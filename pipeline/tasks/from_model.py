"""Task of models that compute their loss themselves, as transformers models do."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from pipeline.errors import ExperimentError
from pipeline.tasks.supervised import IGNORED
from pipeline.tasks.trainee import Loss, Task, count_samples, describe

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

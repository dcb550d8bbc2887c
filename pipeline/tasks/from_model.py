"""Task of models that compute their loss themselves, as transformers models do."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from pipeline.errors import ExperimentError
from pipeline.tasks.protocols import StepOutput, Task

IGNORED = -100
"""Default ``ignore_index`` of torch's losses."""
_CLOSE = 1e-5
_SHIFTED = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


class FromModel(Task):
    """``model(**batch).loss``, for models that compute their loss and mappings as batches.

    transformers models compute a loss from ``labels``. The loss is weighted by the number of labels other than -100, so
    that the step is the same for any number of workers. Without labels, or with floating-point labels, it is weighted
    by the number of samples. Metrics get logits and labels. For sequences their shapes are (batch * time, classes) and
    (batch * time), including labels of -100.
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
        self._is_checked = False

    @override
    def __call__(self, model: nn.Module, batch: Any) -> StepOutput:
        """Compute the loss of a mapping.

        Raises:
            ExperimentError: the batch is not a mapping, or the model returns no loss.
        """
        if not isinstance(batch, Mapping):
            message = f"a batch is {described(batch)}, not a mapping. Return mappings such as {{input_ids: ..., "
            raise ExperimentError.of("data", f"{message}{self.labels}: ...}} from the dataset.")
        outputs = model(**batch)
        loss = _field(outputs, "loss")
        if not isinstance(loss, Tensor):
            raise self._no_loss(model, batch, outputs)
        logits, labels = _field(outputs, "logits"), batch.get(self.labels)
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return StepOutput(loss, outputs if logits is None else logits, labels)
        is_sequence = logits is not None and labels.ndim > 1 and logits.shape[:-1] == labels.shape
        shifted = labels.ndim > 1 and (_shifts(model) if self._shifted is None else self._shifted)
        if is_sequence and not self._is_checked:
            self._check(loss, logits, labels, shifted=shifted)
        if shifted:
            labels = labels[..., 1:]
            logits = logits[..., :-1, :] if logits is not None else None
        weight = (labels != IGNORED).sum()
        if is_sequence:
            logits, labels = logits.flatten(0, -2), labels.flatten()
        return StepOutput(loss, outputs if logits is None else logits, labels, weight)

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the inputs of a batch: all tensors but the labels."""
        return {name: one for name, one in batch.items() if name != self.labels and isinstance(one, Tensor)}

    def _check(self, loss: Tensor, logits: Tensor, labels: Tensor, *, shifted: bool) -> None:
        """Refuse a loss that is the mean over other labels than those that are counted; other losses can't be checked.

        Raises:
            ExperimentError: ``shifted`` isn't what the model does.
        """
        loss = loss.detach().float()
        own, other = (_cross_entropy(logits, labels, shifted=each) for each in (shifted, not shifted))
        self._is_checked = bool(own.isfinite() and other.isfinite())
        if not torch.isclose(own, loss, rtol=_CLOSE) and torch.isclose(other, loss, rtol=_CLOSE):
            which = "the same label" if shifted else "the next label"
            message = f"the model compares each output with {which}, so the weight of the loss is wrong"
            raise ExperimentError.of("task.shifted", f"{message}; set shifted: {str(not shifted).lower()}")

    def _no_loss(self, model: nn.Module, batch: Mapping[str, Any], outputs: Any) -> ExperimentError:
        returned = ", ".join(outputs) if isinstance(outputs, Mapping) else described(outputs)
        lacks = "" if self.labels in batch else f", which has no {self.labels}"
        return ExperimentError.of(
            "task",
            f"the model returned no loss, but {returned}, for a batch of {', '.join(batch)}{lacks}. Use a model whose "
            "head computes the loss from labels, e.g. pipeline.models.pretrained with task: sequence-classification.",
        )


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
    if inner is None or getattr(inner.config, "is_encoder_decoder", False):
        return False
    return any(part in type(inner).__name__ for part in _SHIFTED)


def described(value: object) -> str:
    """Return what a value is, for messages."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a mapping with the keys {', '.join(map(str, value))}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}: {', '.join(map(_part, value))}"
    return f"of type {type(value).__name__}"


def _part(value: object) -> str:
    return f"Tensor {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__

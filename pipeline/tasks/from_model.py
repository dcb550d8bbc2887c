"""Task of models that compute their own loss, as transformers' do."""

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
    """The loss that a model computes itself: ``model(**batch).loss``, for batches that are mappings.

    transformers' models do, of ``labels``. It is weighted by the labels that aren't -100, so that any number of workers
    has the same step; without labels, or where they are floats, by samples. Metrics see logits and labels, of sequences
    (batch * time, classes) and (batch * time), -100 included.
    """

    def __init__(self, *, labels: str = "labels", shifted: bool | None = None) -> None:
        """Name the labels in a batch.

        Args:
            labels: key of the labels; the other keys are the inputs of the model.
            shifted: True if the model compares each output with the next label, so the first label doesn't count. None:
                as transformers' models do it: those with ForCausalLM, LMHeadModel or ForConditionalGeneration in the
                name of their class, unless they have an encoder.
        """
        self.labels = labels
        self._shifted = shifted
        self._is_checked = False

    @override
    def __call__(self, model: nn.Module, batch: Any) -> StepOutput:
        """Compute the loss of a mapping.

        Raises:
            ExperimentError: the batch is no mapping, or the model returns no loss.
        """
        if not isinstance(batch, Mapping):
            message = f"a batch is {described(batch)}, not a mapping; return mappings such as {{input_ids: ..., "
            raise ExperimentError.of("data", f"{message}{self.labels}: ...}} from the dataset")
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
            message = f"the loss of the model compares each output with {which}, so its weight would be wrong"
            raise ExperimentError.of("task.shifted", f"{message}; write shifted: {str(not shifted).lower()}")

    def _no_loss(self, model: nn.Module, batch: Mapping[str, Any], outputs: Any) -> ExperimentError:
        returned = ", ".join(outputs) if isinstance(outputs, Mapping) else described(outputs)
        lacks = "" if self.labels in batch else f", which has no {self.labels}"
        return ExperimentError.of(
            "task",
            f"needs a model that returns a loss, but it returned {returned} for a batch of {', '.join(batch)}{lacks}; "
            "name a model with a head that computes it from labels, e.g. pipeline.models.pretrained with task: "
            "sequence-classification",
        )


def _field(outputs: Any, name: str) -> Any:
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)


@torch.no_grad()
def _cross_entropy(logits: Tensor, labels: Tensor, *, shifted: bool) -> Tensor:
    if shifted:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    return functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED)


def _shifts(model: nn.Module) -> bool:
    """Tell if a model of transformers compares each output with the next label, by the name of its class."""
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

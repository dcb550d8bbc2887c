"""Tasks: the computation of the loss from a batch, by default ``loss(model(inputs), targets)``.

An experiment with other batches names its own class in ``task:``. A task calls ``model`` itself, so that the wrapper of
the parallel strategy takes part.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from pipeline.errors import ExperimentError
from pipeline.tasks.gathering import gathered

__all__ = [
    "FromModel",
    "LanguageModel",
    "RecurrentLanguageModel",
    "Stateful",
    "StepOutput",
    "Supervised",
    "Task",
    "gathered",
    "is_known",
]

_HINT = "return pairs from the dataset, or write a `task:` that reads this batch"
_MEAN_REDUCTIONS = ("mean", "batchmean")  # batchmean is KLDivLoss's mean over samples
_IGNORED = -100
"""Default ``ignore_index`` of torch's losses."""
_CLOSE = 1e-5
_SHIFTED = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


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

    ``kl`` is reported as train/kl for each step and as validation/kl. Names are the same for every batch.
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


class Supervised(Task):
    """``loss(model(inputs), targets)`` for batches of (inputs, targets).

    Of an output with ``logits``, as transformers' models return it, only the logits are used. torch's cross entropies
    are weighted by the number of targets that aren't ignored, or by the sum of their class weights.

    Raises:
        ExperimentError: the loss isn't a mean over the batch, or a batch isn't a pair.
    """

    def __init__(self, loss: Callable[[Any, Any], Tensor], *, ignores: bool = False) -> None:
        """Wrap a loss; ``ignores``: targets may equal its ``ignore_index``, even torch's default of -100."""
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
        """Compute the loss of (inputs, targets)."""
        inputs, targets = _pair(batch)
        outputs = _logits(model(inputs))
        loss = self.loss(outputs, self._counted(targets))
        if not isinstance(loss, Tensor) or loss.ndim:
            raise ExperimentError.of("loss", f"is {_describe(loss)}, not a scalar; return the mean over the batch")
        return StepOutput(loss, outputs, targets, self._weight(targets))

    def refuse_ignored(self, batch: Any) -> None:
        """Check a batch on the CPU for ignored targets if the loss is weighted by samples.

        Raises:
            ExperimentError: a target is ignored.
        """
        if self._entropy is None or self._weighs_by_targets or not isinstance(batch, tuple | list) or len(batch) != 2:
            return
        targets = batch[1]
        # No other label is negative, and a minimum takes a third of the time of a comparison.
        if isinstance(targets, Tensor) and targets.ndim == 1 and len(targets) and int(targets.min()) == _IGNORED:
            message = (
                f"some targets are {_IGNORED}, which it ignores; write ignore_index: {_IGNORED} to divide by the rest"
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
        if entropy is None or targets.is_floating_point():  # class probabilities: a mean over the samples
            return None
        if entropy.weight is not None:
            return _weights(entropy, targets).sum()
        if targets.ndim > 1 or self._weighs_by_targets:
            return (targets != entropy.ignore_index).sum()
        return None


class LanguageModel(Task):
    """Cross entropy of each next token, for batches of (tokens, next_tokens), both int64 of (batch, time).

    Targets of -100 are padding. Metrics see logits (batch * time, vocabulary) and tokens (batch * time).

    Raises:
        ExperimentError: a batch isn't a pair.
    """

    @override
    def __call__(self, model: nn.Module, batch: Any) -> StepOutput:
        """Compute the loss of (tokens, next_tokens)."""
        tokens, next_tokens = _pair(batch)
        logits = _logits(model(tokens)).flatten(0, 1)
        targets = next_tokens.flatten()
        loss = functional.cross_entropy(logits, targets, ignore_index=_IGNORED)
        return StepOutput(loss, logits, targets, (targets != _IGNORED).sum())


class RecurrentLanguageModel(LanguageModel):
    """`LanguageModel` with truncated backpropagation through time, for ``model(tokens, state)`` -> (logits, state).

    The state is that of torch's LSTM, GRU or RNN. Metrics see logits (batch, time, vocabulary) and tokens (batch,
    time), as torchmetrics' Perplexity takes them.
    """

    batch_dim = 1

    @override
    def __call__(self, model: nn.Module, batch: Any, state: Any = None) -> StepOutput:
        """Compute the loss of (tokens, next_tokens), whose rows continue those that ``state`` is of."""
        tokens, targets = _pair(batch)
        outputs = model(tokens, state)
        if not isinstance(outputs, tuple) or len(outputs) != 2:
            raise ExperimentError.of("task", f"needs a model that returns logits and state, not {_describe(outputs)}")
        logits, state = outputs
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=_IGNORED)
        return StepOutput(loss, logits, targets, (targets != _IGNORED).sum(), state=state)


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
            message = f"a batch is {_describe(batch)}, not a mapping; return mappings such as {{input_ids: ..., "
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
        weight = (labels != _IGNORED).sum()
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
        returned = ", ".join(outputs) if isinstance(outputs, Mapping) else _describe(outputs)
        lacks = "" if self.labels in batch else f", which has no {self.labels}"
        return ExperimentError.of(
            "task",
            f"needs a model that returns a loss, but it returned {returned} for a batch of {', '.join(batch)}{lacks}; "
            "name a model with a head that computes it from labels, e.g. pipeline.models.pretrained with task: "
            "sequence-classification",
        )


def __getattr__(name: str) -> Any:
    """Import the adapter of LightningModules when it is asked for; it imports this module."""
    if name == "Lightning":
        from pipeline.tasks.lightning import Lightning

        return Lightning
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def is_known(task: object) -> bool:
    """Tell if a task's loss is torch's own, so that it needs no test of being a mean over the samples."""
    if isinstance(task, Supervised):
        return _is_entropy(task.loss) or type(task.loss).__module__ == "torch.nn.modules.loss"
    return isinstance(task, LanguageModel)


def _is_entropy(loss: object) -> TypeGuard[nn.CrossEntropyLoss | nn.NLLLoss]:
    """Tell if a loss computes torch's cross entropy; a subclass may compute something else."""
    return getattr(type(loss), "forward", None) in (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)


def _has_zero(weight: Tensor | None) -> bool:
    return weight is not None and bool((weight == 0).any())


def _weights(entropy: nn.CrossEntropyLoss | nn.NLLLoss, targets: Tensor) -> Tensor:
    """Return the class weight of each target, 0 for ignored ones."""
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


def _field(outputs: Any, name: str) -> Any:
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)


@torch.no_grad()
def _cross_entropy(logits: Tensor, labels: Tensor, *, shifted: bool) -> Tensor:
    if shifted:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    return functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=_IGNORED)


def _shifts(model: nn.Module) -> bool:
    """Tell if a model of transformers compares each output with the next label, by the name of its class."""
    inner = next((one for one in model.modules() if hasattr(one, "config")), None)
    if inner is None or getattr(inner.config, "is_encoder_decoder", False):
        return False
    return any(part in type(inner).__name__ for part in _SHIFTED)


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a mapping with the keys {', '.join(map(str, value))}"
    return f"of type {type(value).__name__}"

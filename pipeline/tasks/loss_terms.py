"""Losses that a model computes itself as terms, as detectors do."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from typing_extensions import override

from pipeline.errors import ExperimentError
from pipeline.tasks import StepOutput, Task


class LossTerms(Task):
    """The sum of the terms that a model computes, each of which is a log, too.

    For batches of (inputs, targets) of any kind, such as lists of what differs in size, and a model that returns terms
    of ``model(inputs, targets)`` in training mode and predictions of ``model(inputs)`` in evaluation mode, as
    torchvision's detectors do. Terms are a mapping of scalars. Metrics see the predictions and the targets.

    In evaluation the terms are computed in a second pass, for which all modules but normalizations and dropout are in
    training mode.
    """

    def __init__(self, *, weights: Mapping[str, float] | None = None, divisor: str | None = None) -> None:
        """Set how terms are summed.

        Args:
            weights: factors of terms in the sum, by name; 1 for the others. Logs are without them.
            divisor: key of the entries of each target that all terms are divided by the number of, e.g. boxes; None:
                terms are means over the samples.
        """
        self._weights, self._divisor = dict(weights or {}), divisor

    @override
    def __call__(self, model: nn.Module, batch: Any) -> StepOutput:
        """Compute the loss of (inputs, targets).

        Raises:
            ExperimentError: the batch isn't a pair, the model returns no terms, or targets lack the divisor.
        """
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            message = "a batch isn't (inputs, targets); write a loader.collate that returns such a pair"
            raise ExperimentError.of("data", message)
        inputs, targets = batch
        if model.training:
            predictions, terms = None, model(inputs, targets)
        else:
            predictions = model(inputs)
            with _computing_terms(model):
                terms = model(inputs, targets)
        loss = self._sum(terms)
        weight = None if self._divisor is None else loss.new_tensor(self._count(targets, self._divisor))
        return StepOutput(loss, predictions, targets, weight, dict(terms))

    def _sum(self, terms: Any) -> Tensor:
        if not isinstance(terms, Mapping) or not terms or not all(isinstance(one, Tensor) for one in terms.values()):
            kind = type(terms).__name__
            message = f"needs a model that returns a mapping of scalar terms in training mode, but it returned a {kind}"
            raise ExperimentError.of("task", message)
        if unknown := sorted(self._weights.keys() - terms.keys()):
            message = f"the model returns no term {unknown[0]}; it returns {', '.join(terms)}"
            raise ExperimentError.of(f"task.weights.{unknown[0]}", message)
        return torch.stack([self._weights.get(name, 1.0) * term for name, term in terms.items()]).sum()

    @staticmethod
    def _count(targets: Any, divisor: str) -> int:
        if not isinstance(targets, tuple | list) or not all(divisor in target for target in targets):
            message = f"is {divisor}, but targets aren't a list of mappings with {divisor}; name one of their keys"
            raise ExperimentError.of("task.divisor", message)
        return sum(len(target[divisor]) for target in targets)


@contextmanager
def _computing_terms(model: nn.Module) -> Iterator[None]:
    """Put modules into training mode inside the block, but those whose results would change."""
    changed = [one for one in model.modules() if not one.training and not isinstance(one, _NormBase | _DropoutNd)]
    for module in changed:
        module.training = True
    try:
        yield
    finally:
        for module in changed:
            module.training = False

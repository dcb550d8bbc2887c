"""Base class of features: each adds to a training what one key of the experiment, or one kind of task, asks for."""

from collections.abc import Mapping
from typing import Any, Self

from pipeline.training.context import TrainContext
from pipeline.training.step.plain import Parts


class Feature:
    """Addition to a training. Each method is optional."""

    @classmethod
    def of(cls, training: TrainContext) -> Self | None:
        """Return the feature of a training that is built; None if the experiment does not ask for it."""
        return None

    def around_gradients(self, parts: Parts) -> Parts:
        """Replace or wrap functions by which a step computes its gradients.

        Called for the first step, when it is not known yet what the task returns, and once more after its first batch.
        """
        return parts

    def around_update(self, parts: Parts) -> Parts:
        """Replace or wrap functions by which a step updates the weights. Measurements of gradients leave them out."""
        return parts

    def take_columns(self) -> Mapping[str, Mapping[int, Any]]:
        """Return values to report since the last call: by step, counted from 1, for each name without "train/"."""
        return {}

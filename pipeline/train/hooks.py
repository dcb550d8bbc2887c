"""Hooks: what happens around the steps of a training without changing how a gradient is computed."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from pipeline.train.state import State


class Hook:
    """Base of all hooks, built in or of ``hooks:`` in the file. Each method is optional, and called on all ranks.

    Under the path of its class, a hook's state is part of checkpoints.
    """

    def start(self, s: "State") -> None:
        """Prepare once all is built, before a checkpoint is loaded.

        Raises:
            ExperimentError: the experiment contradicts itself.
        """

    def transform(self, batch: Any) -> Any:
        """Return a training batch changed on its device, with as many samples, e.g. by MixUp.

        Random numbers are seeded before.
        """
        return batch

    def before_update(self, s: "State") -> None:
        """Read or change the gradients of the global batch, `State.gradients`, before they are clipped.

        ``s.step`` is the number of this step, counted from 0.
        """

    def after_step(self, s: "State") -> None:
        """Follow a step, also one that was skipped; ``s.step`` is its number, counted from 0."""

    def report(self, s: "State") -> Mapping[str, float | Tensor]:
        """Return values by name, reported as train/NAME with the losses about three times a second. Collective."""
        return {}

    def after_evaluation(self, s: "State", values: Mapping[str, float]) -> Mapping[str, float] | None:
        """Follow the values of an evaluation, equal on all ranks; return others to report.

        Setting ``s.stop_reason`` on all ranks ends the training, after a checkpoint.
        """

    def evaluating(self, s: "State") -> AbstractContextManager[object]:
        """Return a context in which the model has the weights to evaluate and to save as the result. Collective."""
        return nullcontext()

    def state_dict(self) -> Mapping[str, Any]:
        """Return what a resumed training needs: numbers, texts and tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""


def name_of(hook: Hook) -> str:
    """Return the key of a hook's state in a checkpoint."""
    return f"{type(hook).__module__}.{type(hook).__qualname__}"

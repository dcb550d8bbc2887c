"""Base class of features: each adds to a training what one key of the experiment, or one kind of task, asks for."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple, Self

from pipeline.errors import ExperimentError
from pipeline.protocol.events import Outbox, Point
from pipeline.training.context import TrainContext
from pipeline.training.step.plain import Parts


class Saved(NamedTuple):
    """Checkpoint from which a training resumes, or whose weights are loaded."""

    step: int
    """Steps that were done."""
    epoch: int
    """Whole epochs that were done."""
    experiment: Mapping[str, Any]
    """Sections of the experiment that was trained."""
    has_other_rates: bool = False
    """True if the experiment now sets learning rates or their schedule in another way."""


class Feature:
    """Addition to a training. Each method is optional, and called on all ranks."""

    name: ClassVar[str] = ""
    """Key of the state of a built-in feature in a checkpoint; the key of others is the path of their class."""
    belongs_to_weights: ClassVar[bool] = False
    """True if its state is part of the trained weights, which are loaded to evaluate or export a checkpoint."""
    is_measured: ClassVar[bool] = True
    """False if it must not follow the steps that are measured after a training, which change no weights."""

    @classmethod
    def of(cls, training: TrainContext) -> Self | None:
        """Return the feature of a training that is built; None if the experiment does not ask for it.

        Raises:
            ExperimentError: the experiment asks for what can't be done.
        """
        return None

    def around_gradients(self, parts: Parts) -> Parts:
        """Replace or wrap functions by which a step computes its gradients.

        Called for the first step, when it is not known yet what the task returns, and once more after its first batch.
        """
        return parts

    def around_update(self, parts: Parts) -> Parts:
        """Replace or wrap functions by which a step updates the weights. Measurements of gradients leave them out."""
        return parts

    def start(self, outbox: Outbox) -> None:
        """Check and report what can be known before the first step of a training. Collective.

        Raises:
            ExperimentError: the experiment contradicts itself.
        """

    def take_columns(self) -> Mapping[str, Mapping[int, Any]]:
        """Return values to report since the last call: by step, counted from 1, for each name without "train/".

        Collective.
        """
        return {}

    def after_report(self, *, step: int, seconds: float) -> None:
        """Follow the reports of a training, about three a second.

        Setting `TrainContext.stop_reason` ends the training, after an evaluation and a checkpoint. Collective.

        Args:
            step: steps done.
            seconds: time that the steps since the last report have taken, on average of the ranks.
        """

    def after_evaluation(self, values: Mapping[str, float], *, step: int) -> Mapping[str, float]:
        """Follow the values of an evaluation after ``step`` steps, equal on all ranks; return others to report.

        Setting `TrainContext.stop_reason` ends the training. Collective.

        Raises:
            ExperimentError: a value that it needs is not among them.
        """
        return {}

    def evaluating(self) -> AbstractContextManager[object]:
        """Return a context in which the model has the weights to evaluate and to save as the result. Collective."""
        return nullcontext()

    def state_dict(self) -> Mapping[str, Any] | None:
        """Return what a resumed training needs: numbers, texts and tensors, which are not copied; None for nothing."""
        return None

    def load_state_dict(self, state: Mapping[str, Any] | None, *, saved: Saved) -> None:
        """Load what `state_dict` returned; None if the checkpoint has nothing of this feature.

        Raises:
            ExperimentError: the state doesn't fit.
        """


def name_of(feature: Feature) -> str:
    """Return the key of a feature's state in a checkpoint."""
    kind = type(feature)
    is_built_in = kind.__module__.startswith(__name__.partition(".")[0] + ".")
    return feature.name if is_built_in and feature.name else f"{kind.__module__}.{kind.__qualname__}"


def refuse_returned(feature: Feature, hook: str, returned: object, *, instead: str) -> ExperimentError:
    """Return the error for a feature whose method returned something of the wrong type."""
    message = f"{name_of(feature)}.{hook} returned {type(returned).__name__}; return {instead}"
    return ExperimentError.of("features", message)


def follow_evaluation(feature: Feature, values: Mapping[str, float], *, step: int) -> list[Point]:
    """Let a feature follow an evaluation, see `Feature.after_evaluation`; return the points that it reports.

    Raises:
        ExperimentError: it returned something else than numbers by name, or a name that is taken.
    """
    found = feature.after_evaluation(values, step=step)
    try:
        points = [Point(name, step, float(value)) for name, value in found.items()]
    except (AttributeError, TypeError, ValueError):
        raise refuse_returned(feature, "after_evaluation", found, instead="numbers by name, or {}") from None
    if wrong := next((name for name in found if not isinstance(name, str) or name in values), None):
        message = (
            f"{name_of(feature)}.after_evaluation returned a value of {wrong}, which is taken; choose another name"
        )
        raise ExperimentError.of("features", message)
    return points

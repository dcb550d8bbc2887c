"""ReduceLROnPlateau: the validation metric that it follows, and a check of its direction."""

from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from pipeline.config.reported import PREFIX
from pipeline.config.train import Train
from pipeline.errors import ExperimentError
from pipeline.training.collectives import from_first
from pipeline.training.context import TrainContext
from pipeline.training.metrics import known_direction

KEY = "train.scheduler_metric"


def check_direction(mode: str, train: Train, *, judges: Mapping[str, Any]) -> None:
    """Check that the scheduler's mode is the direction in which its metric improves.

    Args:
        mode: the scheduler's ``mode``.
        train: the section that names the metric.
        judges: metrics or their classes, by name.

    Raises:
        ExperimentError: they contradict each other.
    """
    metric = train.followed_by_plateau
    direction = known_direction(metric, judges=judges)
    if direction is None or direction == mode:
        return
    better = "higher" if direction == "max" else "lower"
    names = [name for name in (f"{PREFIX}{each}" for each in judges) if known_direction(name, judges=judges) == mode]
    other = f", or set {KEY}{f': {names[0]}' if names else ' to another metric'}"
    raise ExperimentError.of(
        "scheduler.mode",
        f"is {mode}, but ReduceLROnPlateau follows {metric}, whose {better} values are better. "
        f"Set mode: {direction}{other if train.scheduler_metric is None else ''}.",
    )


def check(context: TrainContext) -> None:
    """Check the direction of a context's scheduler, of which the file may not show that it is a ReduceLROnPlateau.

    Raises:
        ExperimentError: it contradicts the metric.
    """
    if isinstance(context.scheduler, ReduceLROnPlateau):
        judges = dict(context.metrics.items()) if context.metrics is not None else {}
        check_direction(context.scheduler.mode, context.experiment.train, judges=judges)


def advance(context: TrainContext, values: Mapping[str, float]) -> None:
    """Give a ReduceLROnPlateau the value of its metric from an evaluation, rank 0's on all ranks. Collective.

    Raises:
        ExperimentError: the metric is not among the values.
    """
    if not isinstance(context.scheduler, ReduceLROnPlateau):
        return
    metric = context.experiment.train.followed_by_plateau
    if metric not in values:
        raise ExperimentError.of(KEY, f"{metric} is not reported; name one of {', '.join(values)}")
    context.scheduler.step(from_first(lambda: values[metric], rank=context.rank))

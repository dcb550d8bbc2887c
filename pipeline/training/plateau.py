"""Check that a ReduceLROnPlateau follows its validation metric in the direction in which it improves."""

from collections.abc import Mapping
from typing import Any

from pipeline.config.reported import PREFIX
from pipeline.config.train import Train
from pipeline.errors import ExperimentError
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

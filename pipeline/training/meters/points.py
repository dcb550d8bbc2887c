"""Points of training metrics from the values of single steps: a few a second, whatever a step takes."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from statistics import fmean

from pipeline.config.reported import GRADIENT_NORM, LEARNING_RATE, LOSS, TRAIN
from pipeline.protocol.events import Point


def group_steps(first: int, last: int, *, size: int | None) -> list[range]:
    """Split the steps of a report, counted from 1, into groups that end at multiples of ``size``; None: one group."""
    if last < first:
        return []
    ends = [last] if size is None else sorted({*range(first + -first % size, last, size), last})
    starts = [first, *(end + 1 for end in ends[:-1])]
    return [range(start, end + 1) for start, end in zip(starts, ends, strict=True)]


def iter_points(
    columns: Mapping[str, Mapping[int, float]], groups: Sequence[range], *, skipped: Collection[int]
) -> Iterator[Point]:
    """Yield a point of each metric for each group of steps, at the group's last step.

    A learning rate has its value in the last step, any other metric its mean. The loss and gradient norms of several
    steps also have their lowest and highest value, with "_min" and "_max" at the end of the name.

    Args:
        columns: value by step, counted from 1, for each metric by its name without "train/".
        groups: the steps of each point.
        skipped: steps that changed nothing; their values count in a group that has no others only.
    """
    for group in groups:
        counted = [step for step in group if step not in skipped] or group
        for name, column in columns.items():
            if not (values := [column[step] for step in counted if step in column]):
                continue
            yield Point(f"{TRAIN}{name}", group[-1], values[-1] if name.startswith(LEARNING_RATE) else _mean(values))
            if len(values) > 1 and (name == LOSS or name.startswith(GRADIENT_NORM)):
                yield Point(f"{TRAIN}{name}_min", group[-1], min(values))
                yield Point(f"{TRAIN}{name}_max", group[-1], max(values))


def _mean(values: Sequence[float]) -> float:
    if len(values) == 1:
        return values[0]
    return fmean(values) if all(map(math.isfinite, values)) else math.nan

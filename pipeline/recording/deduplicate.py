"""Deduplication of metrics: steps that are trained again after a failure add no second points."""

from collections.abc import Iterable
from typing import NamedTuple

from pipeline.protocol.events import AnyEvent, Finished, Metrics, Point, SystemMetrics, TrialOpened


class _Series(NamedTuple):
    """Key of a metric: the trial, its repeat and the metric's name."""

    trial: str
    repeat: int
    name: str


class Deduplicator:
    """Filter that drops points of steps already recorded, by the highest step of each metric.

    Training that resumes from a checkpoint, in a resumed run or after a lost worker, repeats steps. Metrics of the
    driver itself about a finished trial, e.g. the speedup, are kept.

    Args:
        events: events of the run so far, from its journal.
    """

    def __init__(self, events: Iterable[AnyEvent] = ()) -> None:
        self._steps: dict[_Series, int] = {}
        self._training: set[tuple[str, int]] = set()
        self._last_sample: dict[str, int] = {}
        self._shift: dict[str, int] = {}
        self._earlier: dict[_Series, int] = {}
        for event in events:
            self.new(event)
        self._training.clear()
        self._earlier = dict(self._steps)

    def new(self, event: AnyEvent) -> AnyEvent | None:
        """Return the event without the points already recorded; None if no point is left."""
        match event:
            case TrialOpened():
                self._training.add((event.trial, event.repeat))
            case Finished():
                self._training.discard((event.trial, event.result.repeat))
            case Metrics():
                return self._new_metrics(event)
            case SystemMetrics():
                return self._counted(event)
        return event

    def _new_metrics(self, event: Metrics) -> Metrics | None:
        is_training = (event.trial, event.repeat) in self._training
        known = self._steps if is_training else self._earlier
        points = []
        for point in event.points:
            series = _Series(event.trial, event.repeat, point.name)
            if series not in known or point.step > known[series]:
                points.append(point)
                self._steps[series] = max(point.step, self._steps.get(series, point.step))
        if len(points) == len(event.points):
            return event
        return event.model_copy(update={"points": tuple(points)}) if points else None

    def _counted(self, event: SystemMetrics) -> SystemMetrics:
        """Shift the steps of a new worker's samples, which it counts from 0, behind those of the worker before."""
        first = min((point.step for point in event.points), default=0)
        if first + self._shift.get(event.node, 0) <= (last := self._last_sample.get(event.node, -1)):
            self._shift[event.node] = last + 1 - first
        shift = self._shift.get(event.node, 0)
        self._last_sample[event.node] = first + shift
        if not shift:
            return event
        points = tuple(Point(point.name, point.step + shift, point.value) for point in event.points)
        return event.model_copy(update={"points": points})

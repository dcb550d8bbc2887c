"""Metric points of a run's events, for every tracker."""

from collections.abc import Iterator, Sequence

from pipeline.protocol.events import AnyEvent, Evaluated, Finished, Metrics, Point, SystemMetrics
from pipeline.protocol.numbers import MEASURED, OF_RANK, STARTUP


def scalars(event: AnyEvent) -> Sequence[Point]:
    """Return the points of an event; none of repeated measurements, whose summary comes at the end."""
    match event:
        case Metrics():
            return () if event.repeat else event.points
        case SystemMetrics():
            return event.points
        case Finished():
            return () if event.result.repeat else tuple(figures(event))
        case Evaluated():
            return [Point(name, event.step, value) for name, value in event.values.items()]
    return ()


def rows(event: AnyEvent) -> dict[int, dict[str, float]]:
    """Return the points of an event by step, in order of the steps."""
    found: dict[int, dict[str, float]] = {}
    for name, step, value in scalars(event):
        found.setdefault(step, {})[name] = value
    return dict(sorted(found.items()))


def figures(event: Finished) -> Iterator[Point]:
    """Return a trial's measurements as metrics at its last step.

    Throughput and step time are the report's; the series of their windows are named ``throughput/samples_per_second``
    and ``time/step_ms``.
    """
    result = event.result
    values = {number.metric: number.value(result) for number in MEASURED} | {STARTUP.metric: STARTUP.value(event)}
    if len(result.peak_memory_mb) > 1:
        values |= {f"{OF_RANK}{rank}": peak for rank, peak in enumerate(result.peak_memory_mb)}
    return (Point(name, result.steps, value) for name, value in values.items() if value is not None)

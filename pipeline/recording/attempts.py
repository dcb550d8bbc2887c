"""How results are sent to MLflow, whoever sends them: in batches, again and again until they are through."""

import time
from collections.abc import Callable, Iterable, Iterator
from threading import Event as Flag

from pipeline.protocol.events import AnyEvent, Metrics, SystemMetrics

BATCH_POINTS = 1000
"""Metric points that go into one call."""
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0)  # between attempts during an outage; the last one again and again
_LAST_ATTEMPTS = 3  # once the run has ended, nobody waits longer for a store that is down


def persist(attempt: Callable[[], bool], *, ending: Flag) -> bool:
    """Try until it works, or the run has ended and it still doesn't."""
    attempts, last_attempts = 0, 0
    while not attempt():
        if ending.is_set():
            last_attempts += 1
            if last_attempts == _LAST_ATTEMPTS:
                return False
            time.sleep(_PAUSES_S[0])
        else:
            ending.wait(_PAUSES_S[min(attempts, len(_PAUSES_S) - 1)])
        attempts += 1
    return True


def batches(events: Iterable[AnyEvent]) -> Iterator[list[AnyEvent]]:
    """Events in lists of about `BATCH_POINTS` points."""
    batch: list[AnyEvent] = []
    points = 0
    for event in events:
        batch.append(event)
        points += size(event)
        if points >= BATCH_POINTS:
            yield batch
            batch, points = [], 0
    if batch:
        yield batch


def size(event: AnyEvent) -> int:
    """What an event counts for in a batch: its metric points, else 1."""
    return len(event.points) if isinstance(event, Metrics | SystemMetrics) else 1

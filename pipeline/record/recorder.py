"""Recorder of a run's events: every event passes here, without repeated points, to the journal and the subscribers."""

import json
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from pipeline.experiment.uris import without_credentials_in
from pipeline.protocol.events import (
    Advanced,
    AnyEvent,
    Finished,
    Heartbeat,
    Metrics,
    Point,
    RunClosed,
    SystemMetrics,
    TrialOpened,
    Warned,
    event_from_json,
    event_to_json,
)
from pipeline.record import loss_file
from pipeline.record.journal import FILE_NAME, Journal, read
from pipeline.record.trial_progress import LOSS

TRANSIENT = (Advanced, Heartbeat)  # Events for displays only


class Subscriber(Protocol):
    """Receiver of every event after it has been journaled; `TRANSIENT` events aren't journaled, but received.

    It must neither block nor raise: it would slow training down.
    """

    def receive(self, event: AnyEvent) -> None:
        """Receive an event; called by one thread at a time."""


class Recorder:
    """Writer of a run's journal, which passes each event on to subscribers. Its methods may be called from any thread.

    In a folder with a journal it resumes that run: finished trials are known, metrics of repeated steps are dropped.
    """

    def __init__(self, folder: Path, *, subscribers: Sequence[Subscriber]) -> None:
        self.folder = folder
        self.earlier: tuple[Finished, ...] = ()
        """Results of a resumed run's finished trials, the last of each trial and repeat."""
        self.summary = ""  # Summary of the results in Markdown; set by the report
        self.is_resumed = False  # True if the journal had events before
        self._subscribers = list(subscribers)
        self._subjects = set[str]()
        self._guard = threading.Lock()
        # Training that resumes from a checkpoint repeats steps: the last recorded one by trial, repeat and metric.
        self._steps: dict[tuple[str, int, str], int] = {}
        self._finished = set[tuple[str, int]]()
        self._samples = defaultdict[str, int](int)
        self._journal = Journal(folder / FILE_NAME)
        try:
            ends: dict[tuple[str, int], Finished] = {}
            for event in read(folder / FILE_NAME):  # one event in memory at a time
                self.is_resumed = True
                if isinstance(event, TrialOpened):  # launched again, e.g. to train longer: it may not have ended since
                    ends.pop((event.trial, event.repeat), None)
                elif isinstance(event, Finished):
                    ends[event.result.trial, event.result.repeat] = event
                self._remove_known(event)
        except BaseException:
            self._journal.close()
            raise
        self.earlier = tuple(ends.values())
        self._finished.clear()

    def subscribe(self, subscriber: Subscriber) -> None:
        """Add a subscriber for the events from now on."""
        with self._guard:
            self._subscribers.append(subscriber)

    @contextmanager
    def subscribed(self, subscriber: Subscriber) -> Iterator[None]:
        """Add a subscriber for the events inside the block."""
        self.subscribe(subscriber)
        try:
            yield
        finally:
            with self._guard:
                self._subscribers.remove(subscriber)

    def receive(self, event: AnyEvent, line: bytes | None = None) -> None:
        """Record an event, by its line from a worker if it stays so; subscribers get it even after an OSError."""
        with self._guard:
            failure: OSError | None = None
            if isinstance(event, Metrics) and event.losses:
                try:
                    loss_file.write(self.folder, event.losses, first=event.step - event.steps + 1)
                except OSError as error:
                    failure = error
                event, line = event.model_copy(update={"losses": ()}), None
            new = self._remove_known(event)
            if new is not None and not isinstance(new, TRANSIENT):
                encoded = line if line and new is event else event_to_json(new)
                if b"://" in encoded:
                    encoded = json.dumps(_cut(json.loads(encoded)), ensure_ascii=False, separators=(",", ":")).encode()
                    new = event_from_json(encoded)
                try:
                    self._journal.append(encoded, is_end=isinstance(new, RunClosed))
                except OSError as error:
                    failure = error
            if new is not None:
                for subscriber in self._subscribers:
                    subscriber.receive(new)
            if failure:
                raise failure

    def close(self) -> None:
        """Close the journal; no event may follow."""
        with self._guard:
            self._journal.close()

    def _remove_known(self, event: AnyEvent) -> AnyEvent | None:
        """Return an event without the points that are recorded; None if it has no others, or warns a second time."""
        match event:
            case TrialOpened():
                self._subjects.clear()
                self._finished.discard((event.trial, event.repeat))
            case Finished():
                self._finished.add((event.trial, event.result.repeat))
            case Warned() if event.subject:
                if event.subject in self._subjects:
                    return None
                self._subjects.add(event.subject)
            case SystemMetrics():  # a new worker counts its samples from 0
                number = self._samples[event.node]
                self._samples[event.node] += 1
                points = tuple(Point(name, number, value) for name, _, value in event.points)
                return event if points == event.points else event.model_copy(update={"points": points})
            case Metrics():
                return self._remove_points(event)
        return event

    def _remove_points(self, event: Metrics) -> Metrics | None:
        # The driver's numbers on a trial that has ended now, e.g. its speedup, are not repeated steps.
        is_repeatable = (event.trial, event.repeat) not in self._finished
        reported = self._steps.get((event.trial, event.repeat, LOSS), 0)
        points = []
        for point in event.points:
            series = (event.trial, event.repeat, point.name)
            if not is_repeatable or point.step > self._steps.get(series, point.step - 1):
                points.append(point)
                self._steps[series] = max(point.step, self._steps.get(series, point.step))
        if len(points) == len(event.points):
            return event
        steps = max(0, min(event.steps, event.step - reported))  # the others are repeated
        return event.model_copy(update={"points": tuple(points), "steps": steps}) if points else None


def _cut(value: Any) -> Any:
    """Return a JSON value without the credentials of URIs in its texts, such as those of exceptions."""
    if isinstance(value, str):
        return without_credentials_in(value)
    if isinstance(value, list):
        return [_cut(each) for each in value]
    return {name: _cut(each) for name, each in value.items()} if isinstance(value, dict) else value

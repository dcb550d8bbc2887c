"""Recorder of a run's events: every event passes here, without repeated points, to the journal and the subscribers."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

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

TRANSIENT = (Advanced, Heartbeat)
"""Events for displays only."""


class Subscriber(Protocol):
    """Receiver of every event after it has been journaled; `TRANSIENT` events aren't journaled, but received.

    It must neither block nor raise: it would slow training down.
    """

    def receive(self, event: AnyEvent) -> None:
        """Receive an event; called by one thread at a time."""


class _Series(NamedTuple):
    """Key of a metric: the trial, its repeat and the metric's name."""

    trial: str
    repeat: int
    name: str


class Recorder:
    """Writer of a run's journal, which passes each event on to subscribers. Its methods may be called from any thread.

    In a folder with a journal it resumes that run: finished trials are known, metrics of repeated steps are dropped.

    Raises:
        UsageError: another process writes to the journal, or it is damaged.
        OSError: the journal can't be opened.
    """

    def __init__(self, folder: Path, *, subscribers: Sequence[Subscriber]) -> None:
        self.folder = folder
        self.earlier: tuple[Finished, ...] = ()
        """Results of a resumed run's finished trials, the last of each trial and repeat."""
        self.summary = ""
        """Summary of the results in Markdown; set by the report."""
        self.is_resumed = False
        """True if the journal had events before."""
        self._subscribers = list(subscribers)
        self._subjects: set[str] = set()
        self._guard = threading.Lock()
        # Points of steps that were recorded are dropped: training that resumes from a checkpoint repeats them.
        self._steps: dict[_Series, int] = {}
        self._training: set[tuple[str, int]] = set()
        self._finished: set[tuple[str, int]] = set()
        self._last_sample: dict[str, int] = {}
        self._shift: dict[str, int] = {}
        self._earlier: dict[_Series, int] = {}
        self._journal = Journal(folder / FILE_NAME)
        try:
            self._read_earlier()
        except BaseException:
            self._journal.close()
            raise

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
            new = self._new(event)
            if new is not None and not self._is_told(new):
                if not isinstance(new, TRANSIENT):
                    new, encoded = _without_credentials(new, line if line and new is event else event_to_json(new))
                    try:
                        self._journal.append(encoded, is_end=isinstance(new, RunClosed))
                    except OSError as error:
                        failure = error
                for subscriber in self._subscribers:
                    subscriber.receive(new)
            if failure:
                raise failure

    def close(self) -> None:
        """Close the journal; no event may follow."""
        with self._guard:
            self._journal.close()

    def _read_earlier(self) -> None:
        """Read the journal of a resumed run: results, and the last step of each metric."""
        ends: dict[tuple[str, int], Finished] = {}
        for event in read(self.folder / FILE_NAME):  # one event in memory at a time
            self.is_resumed = True
            if isinstance(event, TrialOpened):  # launched again, e.g. to train longer: it may not have ended since
                ends.pop((event.trial, event.repeat), None)
            elif isinstance(event, Finished):
                ends[event.result.trial, event.result.repeat] = event
            self._new(event)
        self.earlier = tuple(ends.values())
        self._training.clear()
        self._finished.clear()
        self._earlier = dict(self._steps)

    def _is_told(self, event: AnyEvent) -> bool:
        """Return True if the trial has already warned of the same subject."""
        if isinstance(event, TrialOpened):
            self._subjects = set()
        if not isinstance(event, Warned) or not event.subject:
            return False
        is_told = event.subject in self._subjects
        self._subjects.add(event.subject)
        return is_told

    def _new(self, event: AnyEvent) -> AnyEvent | None:
        """Return the event without the points already recorded; None if no point is left."""
        match event:
            case TrialOpened():
                self._training.add((event.trial, event.repeat))
            case Finished():
                self._training.discard((event.trial, event.result.repeat))
                self._finished.add((event.trial, event.result.repeat))
            case Metrics():
                return self._new_metrics(event)
            case SystemMetrics():
                # The steps of a new worker's samples, which it counts from 0, follow those of the worker before.
                first = min((point.step for point in event.points), default=0)
                if first + self._shift.get(event.node, 0) <= (last := self._last_sample.get(event.node, -1)):
                    self._shift[event.node] = last + 1 - first
                shift = self._shift.get(event.node, 0)
                self._last_sample[event.node] = first + shift
                if shift:
                    points = tuple(Point(name, step + shift, value) for name, step, value in event.points)
                    return event.model_copy(update={"points": points})
        return event

    def _new_metrics(self, event: Metrics) -> Metrics | None:
        key = (event.trial, event.repeat)
        # The driver's figures about a trial that has ended now, e.g. its speedup, aren't those of an earlier session.
        known = self._steps if key in self._training else {} if key in self._finished else self._earlier
        points = []
        reported = self._steps.get(_Series(event.trial, event.repeat, LOSS), 0)
        for point in event.points:
            series = _Series(event.trial, event.repeat, point.name)
            if series not in known or point.step > known[series]:
                points.append(point)
                self._steps[series] = max(point.step, self._steps.get(series, point.step))
        if len(points) == len(event.points):
            return event
        steps = max(0, min(event.steps, event.step - reported))  # the others are repeated
        return event.model_copy(update={"points": tuple(points), "steps": steps}) if points else None


def _without_credentials(event: AnyEvent, line: bytes) -> tuple[AnyEvent, bytes]:
    """Cut the credentials of URIs out of all texts of an event, such as those of exceptions."""
    if b"://" not in line:
        return event, line

    def cut(value: object) -> object:
        if isinstance(value, str):
            return without_credentials_in(value)
        if isinstance(value, list):
            return [cut(each) for each in value]
        return {name: cut(each) for name, each in value.items()} if isinstance(value, dict) else value

    values = json.loads(line)
    if (kept := cut(values)) == values:
        return event, line
    line = json.dumps(kept, ensure_ascii=False, separators=(",", ":")).encode()
    return event_from_json(line), line

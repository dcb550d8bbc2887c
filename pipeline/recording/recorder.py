"""The one place that all events of a run pass through: first into the journal, then to its subscribers."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from pipeline.protocol.events import (
    Advanced,
    AnyEvent,
    BatchSizesFound,
    Failed,
    Finished,
    FirstStep,
    Metrics,
    Started,
    Trained,
    TrialOpened,
    Warned,
)
from pipeline.protocol.trial import BatchSizes
from pipeline.recording.deduplicate import Deduplicator
from pipeline.recording.journal import FILE_NAME, Journal, read

_log = logging.getLogger(__name__)


class Subscriber(Protocol):
    """Gets every event after it has been journaled, `Advanced` too, which never is.

    It must not block and not raise: training would feel it.
    """

    def receive(self, event: AnyEvent) -> None:
        """Take note of an event; called by one thread at a time."""


class Recorder:
    """Writes a run's events down and hands them on. Its methods may be called from any thread.

    In a folder with a journal it continues that run: the trials that have ended are known, and points of steps that
    are done again are dropped. Of a trial that is opened again only the new end counts.

    Args:
        folder: the run's folder.
        subscribers: get each event once it is in the journal.
        warn: told once when the journal can't be written, and once when it can again. Training goes on meanwhile.

    Raises:
        UsageError: another process writes to the journal, or it is damaged.
        OSError: the journal can't be opened.
    """

    def __init__(
        self, folder: Path, *, subscribers: Sequence[Subscriber], warn: Callable[[str], None] = _log.warning
    ) -> None:
        self.folder = folder
        self.finished: list[Finished] = []
        """The ends of the trials so far."""
        self.failures: list[Failed] = []
        """The failures of the trial that was opened last, in the order of their arrival."""
        self.started: Started | None = None
        """The start of the trial that was opened last."""
        self.batch_sizes: BatchSizes | None = None
        """What the trial that was opened last found, if that is what it looked for."""
        self.trained: Trained | None = None
        """The result of the trial that was opened last, before what is measured after the training."""
        self.has_ended = False
        """Whether the trial that was opened last has come to its end."""
        self.last_progress: float | None = None
        """When steps were last reported that were new, in seconds of the monotonic clock."""
        self.first_progress: float | None = None
        """The same, for the first time since a trial was opened."""
        self.summary = ""
        """What came out, in Markdown; set once it is known."""
        self.known = 0
        """Events that the journal had before."""
        self._journal = Journal(folder / FILE_NAME)
        self._progress = self._earlier()
        self._subscribers = list(subscribers)
        self._warn = warn
        self._told = ""
        self._subjects: set[str] = set()
        self._lock = threading.Lock()
        self._opened_at = 0.0
        self._time_to_first_step: float | None = None

    @property
    def missing(self) -> int:
        """Events that aren't in the journal because it can't be written."""
        return self._journal.missing

    def subscribe(self, subscriber: Subscriber) -> None:
        """Hand the events from now on to one more."""
        with self._lock:
            self._subscribers.append(subscriber)

    def receive(self, event: AnyEvent) -> None:
        """Record an event."""
        with self._lock:
            new = self._progress.new(event)
            if new is None or self._is_told(new):
                return
            noted = self._noted(new)
            if not isinstance(noted, Advanced):
                self._journal.append(noted)
                self._tell_trouble()
            for subscriber in self._subscribers:
                subscriber.receive(noted)

    def close(self) -> None:
        """No more events."""
        with self._lock:
            self._journal.close()

    def _earlier(self) -> Deduplicator:
        """Continue what the journal has."""
        ends: dict[tuple[str, int], Finished] = {}

        def noticed() -> Iterator[AnyEvent]:  # a long run's events needn't be in memory all at once
            for event in read(self.folder / FILE_NAME):
                self.known += 1
                if isinstance(event, Finished):
                    ends[event.result.trial, event.result.repeat] = event
                yield event

        try:
            progress = Deduplicator(noticed())
        except BaseException:
            self._journal.close()
            raise
        self.finished = list(ends.values())
        return progress

    def _is_told(self, event: AnyEvent) -> bool:
        """Whether the trial has warned of the same subject before."""
        if not isinstance(event, Warned) or not event.subject:
            return False
        is_told = event.subject in self._subjects
        self._subjects.add(event.subject)
        return is_told

    def _tell_trouble(self) -> None:
        trouble = self._journal.trouble
        if trouble and trouble != self._told:
            self._warn(f"{self.folder / FILE_NAME} can't be written: {trouble}; training goes on")
        elif self._told and not trouble:
            lost = f"; {self.missing} events are missing in it" if self.missing else ", nothing is missing"
            self._warn(f"{self.folder / FILE_NAME} is written again{lost}")
        self._told = trouble

    def _noted(self, event: AnyEvent) -> AnyEvent:
        """The event, completed by what only the driver's clock knows."""
        match event:
            case TrialOpened():
                self._opened_at, self._time_to_first_step = time.monotonic(), None
                self.failures, self.started, self.batch_sizes, self.has_ended = [], None, None, False
                self.first_progress, self.trained = None, None
                self._subjects = set()
                again = (event.trial, event.repeat)
                self.finished = [end for end in self.finished if (end.result.trial, end.result.repeat) != again]
            case Started():
                self.started = event
            case Metrics():
                self.last_progress = time.monotonic()
                self.first_progress = self.first_progress or self.last_progress
            case FirstStep():
                self._time_to_first_step = time.monotonic() - self._opened_at
            case Failed():
                self.failures.append(event)
            case Trained():
                self.trained = event
            case Finished():
                event = event.model_copy(update={"time_to_first_step_s": self._time_to_first_step})
                self.finished.append(event)
                self.has_ended = True
            case BatchSizesFound():
                self.batch_sizes, self.has_ended = event.sizes, True
        return event

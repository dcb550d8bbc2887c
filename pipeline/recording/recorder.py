"""The one place that all events of a run pass through: first into the journal, then to its subscribers."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from pipeline.events import AnyEvent, Failed, Finished, FirstStep, TrialOpened
from pipeline.recording.journal import FILE_NAME, Journal


class Subscriber(Protocol):
    """Gets every event after it has been journaled. It must not block and not raise: training would feel it."""

    def receive(self, event: AnyEvent) -> None:
        """Take note of an event; called by one thread at a time."""


class Recorder:
    """Writes a run's events down and hands them on. Its methods may be called from any thread."""

    def __init__(self, folder: Path, *, subscribers: Sequence[Subscriber]) -> None:
        self.folder = folder
        self.finished: list[Finished] = []
        """The ends of the trials so far."""
        self.failures: list[Failed] = []
        """The failures of the trial that was opened last, in the order of their arrival."""
        self.summary = ""
        """What came out, in Markdown; set once it is known."""
        self._journal = Journal(folder / FILE_NAME)
        self._subscribers = subscribers
        self._lock = threading.Lock()
        self._opened_at = 0.0
        self._time_to_first_step: float | None = None

    def receive(self, event: AnyEvent) -> None:
        """Record an event."""
        with self._lock:
            event = self._noted(event)
            self._journal.append(event)
            for subscriber in self._subscribers:
                subscriber.receive(event)

    def close(self) -> None:
        """No more events."""
        with self._lock:
            self._journal.close()

    def _noted(self, event: AnyEvent) -> AnyEvent:
        """The event, completed by what only the driver's clock knows."""
        match event:
            case TrialOpened():
                self._opened_at, self._time_to_first_step, self.failures = time.monotonic(), None, []
            case FirstStep():
                self._time_to_first_step = time.monotonic() - self._opened_at
            case Failed():
                self.failures.append(event)
            case Finished():
                event = event.model_copy(update={"time_to_first_step_s": self._time_to_first_step})
                self.finished.append(event)
        return event

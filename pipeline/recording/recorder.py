"""Recorder of a run's events: every event passes here, first into the journal, then to the subscribers."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from pipeline.protocol.events import (
    Advanced,
    AnyEvent,
    Finished,
    TrialOpened,
    Warned,
)
from pipeline.recording.deduplicate import Deduplicator
from pipeline.recording.journal import FILE_NAME, Journal, read


class Subscriber(Protocol):
    """Receiver of every event after it has been journaled; `Advanced` isn't journaled, but received.

    It must neither block nor raise: it would slow training down.
    """

    def receive(self, event: AnyEvent) -> None:
        """Receive an event; called by one thread at a time."""


class Recorder:
    """Writer of a run's journal, which passes each event on to subscribers. Its methods may be called from any thread.

    In a folder with a journal it resumes that run: finished trials are known, metrics of repeated steps are dropped.

    Args:
        folder: the run's folder.
        subscribers: receivers of each event after it is journaled.

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
        self.known = 0
        """Number of events in the journal of a resumed run."""
        self._journal = Journal(folder / FILE_NAME)
        self._progress = self._earlier()
        self._subscribers = list(subscribers)
        self._subjects: set[str] = set()
        self._lock = threading.Lock()

    def subscribe(self, subscriber: Subscriber) -> None:
        """Add a subscriber for the events from now on."""
        with self._lock:
            self._subscribers.append(subscriber)

    @contextmanager
    def subscribed(self, subscriber: Subscriber) -> Iterator[None]:
        """Add a subscriber for the events inside the block."""
        self.subscribe(subscriber)
        try:
            yield
        finally:
            with self._lock:
                self._subscribers.remove(subscriber)

    def receive(self, event: AnyEvent) -> None:
        """Record an event.

        Raises:
            OSError: the journal can't be written; the subscribers receive the event in any case.
        """
        with self._lock:
            new = self._progress.new(event)
            if new is None or self._is_told(new):
                return
            failure: OSError | None = None
            try:
                if not isinstance(new, Advanced):
                    self._journal.append(new)
            except OSError as error:
                failure = error
            for subscriber in self._subscribers:
                subscriber.receive(new)
            if failure:
                raise failure

    def close(self) -> None:
        """Close the journal; no event may follow."""
        with self._lock:
            self._journal.close()

    def _earlier(self) -> Deduplicator:
        """Read the journal of a resumed run: results, number of events, and the last step of each metric."""
        ends: dict[tuple[str, int], Finished] = {}

        def noticed() -> Iterator[AnyEvent]:  # one event in memory at a time
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
        self.earlier = tuple(ends.values())
        return progress

    def _is_told(self, event: AnyEvent) -> bool:
        """Return True if the trial has already warned of the same subject."""
        if isinstance(event, TrialOpened):
            self._subjects = set()
        if not isinstance(event, Warned) or not event.subject:
            return False
        is_told = event.subject in self._subjects
        self._subjects.add(event.subject)
        return is_told

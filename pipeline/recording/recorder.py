"""The one place that all events of a run pass through: first into the journal, then to its subscribers."""

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

    Raises:
        UsageError: another process writes to the journal, or it is damaged.
        OSError: the journal can't be opened.
    """

    def __init__(self, folder: Path, *, subscribers: Sequence[Subscriber]) -> None:
        self.folder = folder
        self.earlier: tuple[Finished, ...] = ()
        """Ends of trials that the journal had before, the last one of each."""
        self.summary = ""
        """What came out, in Markdown; set once it is known."""
        self.known = 0
        """Events that the journal had before."""
        self._journal = Journal(folder / FILE_NAME)
        self._progress = self._earlier()
        self._subscribers = list(subscribers)
        self._subjects: set[str] = set()
        self._lock = threading.Lock()

    def subscribe(self, subscriber: Subscriber) -> None:
        """Hand the events from now on to one more."""
        with self._lock:
            self._subscribers.append(subscriber)

    @contextmanager
    def subscribed(self, subscriber: Subscriber) -> Iterator[None]:
        """Hand the events to one more inside the block."""
        self.subscribe(subscriber)
        try:
            yield
        finally:
            with self._lock:
                self._subscribers.remove(subscriber)

    def receive(self, event: AnyEvent) -> None:
        """Record an event.

        Raises:
            OSError: the journal can't be written; the subscribers get the event all the same.
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
        self.earlier = tuple(ends.values())
        return progress

    def _is_told(self, event: AnyEvent) -> bool:
        """Return whether the trial has warned of the same subject before."""
        if isinstance(event, TrialOpened):
            self._subjects = set()
        if not isinstance(event, Warned) or not event.subject:
            return False
        is_told = event.subject in self._subjects
        self._subjects.add(event.subject)
        return is_told

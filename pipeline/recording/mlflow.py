"""MLflow as a subscriber: nothing that happens to the tracking store reaches training, and nothing is lost.

Events wait for one background thread, a few in memory and the others in the journal; it sends them in batches and
tries again until they are through. What isn't through at the end is in the journal, and `sync` sends it later.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Event as Flag
from threading import Thread

from pipeline.advance import Advance
from pipeline.errors import UsageError
from pipeline.events import Advanced, AnyEvent, RunClosed, RunOpened
from pipeline.recording import journal
from pipeline.recording.backlog import Backlog, size
from pipeline.recording.delivery import Delivery, quiet
from pipeline.recording.outcome import TrackingOutcome
from pipeline.recording.store import run_link, with_credentials

_BATCH_POINTS = 1000
_BATCH_S = 1.0
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0)  # between attempts during an outage; the last one again and again
_UPLOAD_PAUSE_S = 5.0
_LAST_ATTEMPTS = 3  # once the run has ended, nobody waits longer for a store that is down


class MlflowSubscriber:
    """Sends a run's events to the tracking store that its first event names.

    Args:
        folder: the run's folder, where the journal and the artifacts are.
        warn: told of trouble, from the background thread; once when it begins and once when it ends.
        uri: the store, credentials included; empty for the one that the events name.
        known: events that a continued run has in its journal. They are sent first: some may not have arrived, and
            those that have change nothing.
        is_journaled: whether the journal has all events so far. Only then memory needn't keep those that wait.
    """

    def __init__(
        self,
        *,
        folder: Path,
        warn: Callable[[str], None],
        uri: str = "",
        known: int = 0,
        is_journaled: Callable[[], bool] = lambda: False,
    ) -> None:
        self._folder = folder
        self._known = known
        self._backlog = Backlog(folder / journal.FILE_NAME, is_written=is_journaled)
        self._closing = Flag()
        self._done = Flag()  # is_alive() is wrong once Ctrl-C has interrupted a join()
        self._delivery = Delivery(folder=folder, warn=warn, uri=uri)
        self._waiting = known
        self._upload_at = 0.0
        Thread(target=self._work, name="mlflow", daemon=True).start()

    def receive(self, event: AnyEvent) -> None:
        """Take an event from any thread; returns at once and never raises."""
        if not isinstance(event, Advanced):
            self._backlog.put(event)

    def close(self, timeout_s: float = 60.0) -> TrackingOutcome | None:
        """Wait until MLflow has everything, or won't take it; no events may come after that.

        Returns:
            What has become of the results; None if ``timeout_s`` seconds are over first. Then it may be called again.
        """
        if not self._closing.is_set():
            self._closing.set()
            self._backlog.close()
        return self.outcome if self._done.wait(timeout_s) else None

    @property
    def waiting(self) -> str:
        """What MLflow doesn't have yet, e.g. "12 events and 3 files"."""
        events, files = self._waiting + len(self._backlog), len(self._delivery.run.uploads)
        parts = [f"{events:,} events"] * bool(events) + [f"{files} files"] * bool(files)
        return " and ".join(parts) or "the last words"

    @property
    def outcome(self) -> TrackingOutcome:
        """What has become of the results by now."""
        busy = "" if self._done.is_set() else "the run didn't wait any longer"
        waiting = self._waiting + len(self._backlog)
        trouble = self._delivery.trouble or busy
        return TrackingOutcome.of(self._delivery, folder=self._folder, trouble=trouble, waiting=waiting)

    def _work(self) -> None:
        try:
            with quiet():
                if self._deliver_all():
                    _persist(self._delivery.upload, ending=self._closing)
        except Exception as error:  # noqa: BLE001 - MLflow can't even be imported; training doesn't need it
            self._delivery.fail(error)
        finally:
            self._done.set()

    def _deliver_all(self) -> bool:
        """Send events until the run ends; False if the last ones can't be sent."""
        for earlier in _batches(self._earlier()):
            if not _persist(partial(self._delivery.attempt, earlier), ending=self._closing):
                return False
            self._waiting -= len(earlier)
        self._waiting = 0
        while (batch := self._next_batch()) is not None:
            self._waiting = len(batch)
            if batch and not _persist(partial(self._delivery.attempt, batch), ending=self._closing):
                return False
            self._waiting = 0
            if time.monotonic() >= self._upload_at and not self._delivery.upload():
                self._upload_at = time.monotonic() + _UPLOAD_PAUSE_S  # results don't wait for files
        return True

    def _earlier(self) -> Iterator[AnyEvent]:
        """What a continued run has in its journal; that it was over is over."""
        known = islice(journal.read(self._folder / journal.FILE_NAME), self._known) if self._known else ()
        return (event for event in known if not isinstance(event, RunClosed))

    def _next_batch(self) -> list[AnyEvent] | None:
        """Events of about a second, none if files are due first; None after the end."""
        batch: list[AnyEvent] = []
        points, deadline = 0, self._upload_at if self._delivery.run.uploads else None
        while points < _BATCH_POINTS:
            try:
                event = self._backlog.get(timeout_s=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                break
            if event is None:
                return batch or None
            if not batch:
                deadline = time.monotonic() + _BATCH_S
            batch.append(event)
            points += size(event)
        return batch


def sync(folder: Path, *, warn: Callable[[str], None]) -> TrackingOutcome:
    """Send a finished or crashed run's journal to its tracking store. What is there already isn't added again.

    A journal that nobody closed is that of a killed driver: its MLflow runs end as KILLED, at the time of its last
    event.

    Raises:
        UsageError: no journal, a damaged one, or its run is still going on and sends its events itself.
    """
    path = folder / journal.FILE_NAME
    opened, last, count = None, None, 0
    for event in journal.read(path):  # a second time below: a long run's events needn't be in memory all at once
        opened, last, count = (event if isinstance(event, RunOpened) else opened), event, count + 1
    if journal.is_open(path):
        raise UsageError(
            f"{folder}: this run is still going on and sends its results itself; sync it when it has ended"
        )
    if opened is None or last is None:
        raise UsageError(f"{path}: nothing to send, the run ended before it began")
    uri = with_credentials(opened.tracking_uri)
    delivery = Delivery(folder=folder, warn=warn, uri=uri)
    ending = Flag()
    ending.set()
    with quiet():
        with Advance("sending results", total=count, unit="events") as advance:
            for batch in _batches(_ended_once(path, last=last)):
                if not (sent := _persist(partial(delivery.attempt, batch), ending=ending)):
                    break
                advance.by(len(batch))
        if sent:
            _persist(delivery.upload, ending=ending)
    outcome = TrackingOutcome.of(delivery, folder=folder, trouble=delivery.trouble, waiting=count)
    with suppress(OSError):  # a folder that can only be read is no reason to fail
        outcome.keep(folder)
    if outcome.message:
        return outcome
    link = run_link(uri, outcome.experiment_id, outcome.run_id)
    return outcome.model_copy(update={"message": f"all of {folder} is in MLflow: {link}"})


def _persist(attempt: Callable[[], bool], *, ending: Flag) -> bool:
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


def _ended_once(path: Path, *, last: AnyEvent) -> Iterator[AnyEvent]:
    """The events of a run that may have been continued, or killed; ``last`` is the last one."""
    yield from (event for event in journal.read(path) if not isinstance(event, RunClosed))
    if isinstance(last, RunClosed):
        yield last
    else:
        yield RunClosed(time=last.time, status="KILLED", message="The driver was killed before it could end the run.")


def _batches(events: Iterable[AnyEvent]) -> Iterator[list[AnyEvent]]:
    batch: list[AnyEvent] = []
    points = 0
    for event in events:
        batch.append(event)
        points += size(event)
        if points >= _BATCH_POINTS:
            yield batch
            batch, points = [], 0
    if batch:
        yield batch

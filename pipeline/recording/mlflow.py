"""MLflow as a subscriber: nothing that happens to the tracking store reaches training, and nothing is lost.

Events wait in a queue for one background thread, which sends them in batches and tries again until they are through.
What isn't through at the end is in the journal, and `sync` sends it later.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event as Flag
from threading import Thread

from pipeline.config.schema import Frozen
from pipeline.errors import UsageError
from pipeline.events import AnyEvent, Metrics, RunClosed, RunOpened, SystemMetrics
from pipeline.recording import journal
from pipeline.recording.delivery import Delivery, quiet
from pipeline.recording.store import run_link

_BATCH_POINTS = 1000
_BATCH_S = 1.0
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0)  # between attempts during an outage; the last one again and again
_LAST_ATTEMPTS = 3  # once the run has ended, nobody waits longer for a store that is down


class TrackingOutcome(Frozen):
    """Where the results of a run ended up."""

    experiment_id: str
    """MLflow's id of the experiment; empty if MLflow never answered."""
    run_id: str
    """MLflow's id of the main run; empty if MLflow never answered."""
    delivered: bool
    """Whether everything is in MLflow that it will ever take."""
    message: str = ""
    """What is missing and the command that sends it. Empty if nothing is, or after `sync` where to see it."""


class MlflowSubscriber:
    """Sends a run's events to the tracking store that its first event names.

    Args:
        folder: the run's folder, where the journal and the artifacts are.
        warn: told of trouble, from the background thread; once when it begins and once when it ends.
    """

    def __init__(self, *, folder: Path, warn: Callable[[str], None]) -> None:
        self._folder = folder
        self._queue: SimpleQueue[AnyEvent | None] = SimpleQueue()
        self._closing = Flag()
        self._delivery = Delivery(folder=folder, warn=warn)
        self._waiting: list[AnyEvent] = []
        self._thread = Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()

    def receive(self, event: AnyEvent) -> None:
        """Take an event from any thread; returns at once and never raises."""
        self._queue.put(event)

    def close(self, timeout_s: float = 60.0) -> TrackingOutcome:
        """Wait until MLflow has everything, ``timeout_s`` seconds at most. The last call to this object."""
        self._closing.set()
        self._queue.put(None)
        self._thread.join(timeout_s)
        trouble = self._delivery.trouble or (
            "it took longer than the run could wait" if self._thread.is_alive() else ""
        )
        waiting = len(self._waiting) + max(0, self._queue.qsize() - 1)  # the last one is our None
        return _outcome(self._delivery, folder=self._folder, trouble=trouble, waiting=waiting)

    def _work(self) -> None:
        try:
            with quiet():
                self._deliver_all()
        except Exception as error:  # noqa: BLE001 - MLflow can't even be imported; training doesn't need it
            self._delivery.fail(error)

    def _deliver_all(self) -> None:
        while batch := self._next_batch():
            self._waiting = batch
            if not self._deliver(batch):
                return
            self._waiting = []

    def _next_batch(self) -> list[AnyEvent]:
        """Events of about a second; none after the end."""
        batch: list[AnyEvent] = []
        points, deadline = 0, None
        while points < _BATCH_POINTS:
            try:
                event = self._queue.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except Empty:
                break
            if event is None:
                if batch:
                    self._queue.put(None)  # the end comes after this batch
                break
            batch.append(event)
            points += _size(event)
            deadline = deadline or time.monotonic() + _BATCH_S
        return batch

    def _deliver(self, batch: list[AnyEvent]) -> bool:
        """Try until it works, or the run has ended and it still doesn't."""
        attempts, last_attempts = 0, 0
        while not self._delivery.attempt(batch):
            if self._closing.is_set():
                last_attempts += 1
                if last_attempts == _LAST_ATTEMPTS:
                    return False
                time.sleep(_PAUSES_S[0])
            else:
                self._closing.wait(_PAUSES_S[min(attempts, len(_PAUSES_S) - 1)])
            attempts += 1
        return True


def sync(folder: Path, *, warn: Callable[[str], None]) -> TrackingOutcome:
    """Send a finished or crashed run's journal to its tracking store. What is there already isn't added again.

    A journal that nobody closed is that of a killed driver: its MLflow runs end as KILLED, at the time of its last
    event.

    Raises:
        UsageError: no journal, a damaged one, or its run is still going on and sends its events itself.
    """
    path = folder / journal.FILE_NAME
    events = list(journal.read(path))
    if journal.is_open(path):
        raise UsageError(
            f"{folder}: this run is still going on and sends its results itself; sync it when it has ended"
        )
    opened = next((event for event in events if isinstance(event, RunOpened)), None)
    if opened is None:
        raise UsageError(f"{path}: nothing to send, the run ended before it began")
    delivery = Delivery(folder=folder, warn=warn)
    with quiet():
        for batch in _batches([*events, *_closing(events)]):
            if not any(_attempts(delivery, batch)):
                break
    outcome = _outcome(delivery, folder=folder, trouble=delivery.trouble, waiting=len(events))
    if outcome.message:
        return outcome
    link = run_link(opened.tracking_uri, outcome.experiment_id, outcome.run_id)
    return outcome.model_copy(update={"message": f"all of {folder} is in MLflow: {link}"})


def _attempts(delivery: Delivery, batch: list[AnyEvent]) -> Iterator[bool]:
    for attempt in range(_LAST_ATTEMPTS):
        if attempt:
            time.sleep(_PAUSES_S[0])
        yield delivery.attempt(batch)


def _closing(events: list[AnyEvent]) -> list[AnyEvent]:
    last = events[-1]
    if isinstance(last, RunClosed):
        return []
    return [RunClosed(time=last.time, status="KILLED", message="The driver was killed before it could end the run.")]


def _batches(events: Iterable[AnyEvent]) -> Iterator[list[AnyEvent]]:
    batch: list[AnyEvent] = []
    points = 0
    for event in events:
        batch.append(event)
        points += _size(event)
        if points >= _BATCH_POINTS:
            yield batch
            batch, points = [], 0
    if batch:
        yield batch


def _size(event: AnyEvent) -> int:
    return len(event.points) if isinstance(event, Metrics | SystemMetrics) else 1


def _outcome(delivery: Delivery, *, folder: Path, trouble: str, waiting: int) -> TrackingOutcome:
    message = ""
    if trouble:
        message = (
            f"{waiting} events aren't in MLflow ({trouble}); they are in {folder / journal.FILE_NAME}, "
            f"send them with: pipeline sync {folder}"
        )
    elif delivery.refused:
        message = f"MLflow refused {delivery.refused} events; they are in {folder / journal.FILE_NAME}"
    return TrackingOutcome(
        experiment_id=delivery.run.experiment_id,
        run_id=delivery.run.run_id,
        delivered=not trouble,
        message=message,
    )

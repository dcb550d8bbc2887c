"""Sender of a run's journal to MLflow and to the named loggers, while the run is live or after its end."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event as Flag
from time import monotonic

from pipeline.protocol.events import AnyEvent, Metrics, RunClosed, RunOpened, SystemMetrics, is_reason_to_keep
from pipeline.protocol.progress import ProgressReporter
from pipeline.record.journal import FILE_NAME, Feed
from pipeline.tracking.mlflow.delivery import Delivery, persist, quiet
from pipeline.tracking.mlflow.outcome import TrackingOutcome
from pipeline.tracking.mlflow.store import create_store
from pipeline.tracking.trackers.attached import attach_named
from pipeline.wording import counted

_BATCH_POINTS = 1000
"""Metric points in one call."""
_BATCH_S = 1.0
_UPLOAD_PAUSE_S = 2.0


class Sender:
    """Sender of a journal, which may still be written. What was sent before is sent again, which adds nothing.

    Args:
        folder: the run's folder.
        uri: URI of the store with credentials; empty for the URI in the run's first event.
        other_uri: URI of the store, without credentials, if it isn't the run's own.
        warn: called when an outage starts and when it ends, also from other threads.
        adds: True if the run has ended before, and keeps its status meanwhile.
        loggers: loggers in addition to MLflow, see ``tracking.loggers``; each has a thread.
        wanted: filter of the events for MLflow.
        opened: called once MLflow has the run, unless that is after the run's end.

    Raises:
        OSError: the journal can't be read.
    """

    def __init__(
        self,
        folder: Path,
        *,
        uri: str,
        other_uri: str = "",
        warn: Callable[[str], None],
        adds: bool = False,
        loggers: Sequence[str] = (),
        wanted: Callable[[AnyEvent], bool] = lambda _: True,
        opened: Callable[[], None] = lambda: None,
    ) -> None:
        self.is_ending = Flag()
        """Set once the journal is complete; from then on an attempt is repeated only a few times."""
        self._feed = Feed(folder / FILE_NAME)
        self._delivery = Delivery(folder=folder, warn=warn, uri=uri, adds=adds)
        self._loggers = attach_named(loggers, folder, warn=warn)
        self._folder, self._uri, self._other_uri = folder, uri, other_uri
        self._wanted, self._opened = wanted, opened
        self._batch = 0  # events being sent
        self._upload_at = 0.0
        self._is_kept = adds
        self._is_opened = self._is_done = self._is_complete = False

    def end(self, event: RunClosed | None) -> None:
        """Declare the journal complete; ``event`` is sent as the end of the run."""
        self.is_ending.set()
        self._feed.end(event)
        for logger in self._loggers:
            logger.end(event)

    def close(self) -> None:
        """Close the journal."""
        self._feed.close()

    def send(self) -> None:
        """Send everything; return after `end`, when MLflow and the loggers have accepted or rejected all of it."""
        try:
            with quiet():
                self._is_complete = self._deliver()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - also SystemExit, of a user's file that hides a package
            with suppress(Exception):  # else nothing would report the end
                self._delivery.fail(error)
        self._is_done = True
        for logger in self._loggers:
            logger.done.wait()

    @property
    def outcome(self) -> TrackingOutcome:
        """Outcome of the delivery to MLflow so far."""
        run, folder, events = self._delivery.run, self._folder, self._batch + len(self._feed)
        loggers = [logger.name for logger in self._loggers if not logger.done.is_set()]
        outcome = TrackingOutcome(
            experiment_id=run.experiment_id,
            run_id=run.run_id,
            delivered=True,
            uri=self._other_uri,
            late=(*(() if self._is_done else ("MLflow",)), *loggers),
        )
        ending = "the delivery ended early" if self._is_done else "the run stopped waiting"
        if trouble := self._delivery.trouble or ("" if self._is_complete else ending):
            return outcome.lacking(self._delivery.waiting(events) or "some results", folder=folder, trouble=trouble)
        if refused := self._delivery.refused:
            message = f"MLflow rejected {counted(refused, 'event')}, kept in {folder / FILE_NAME}"
            return outcome.model_copy(update={"message": message})
        return outcome

    @property
    def missing(self) -> Sequence[str]:
        """Files and models that are not sent, after a warning."""
        return self._delivery.run.missing

    @property
    def has_failed_logger(self) -> bool:
        """True if a logger has raised an exception, after a warning."""
        return any(logger.has_failed for logger in self._loggers)

    def _deliver(self) -> bool:
        """Send everything to MLflow; return False if the store doesn't accept it after the end."""
        with ProgressReporter("sending results", total=len(self._feed) or None, unit="events") as progress:
            while (batch := self._next_batch()) is not None:
                self._batch = len(batch)
                events = [event for event in batch if self._wanted(event)]
                if events and not persist(partial(self._delivery.attempt, events), ending=self.is_ending):
                    return False
                self._batch = 0
                progress.by(len(batch))
                self._report_opened()
                is_due = monotonic() >= self._upload_at and not self.is_ending.is_set()  # at the end, files come last
                if is_due and not self._delivery.upload():
                    self._upload_at = monotonic() + _UPLOAD_PAUSE_S  # metrics don't wait for files
        return persist(self._delivery.upload, ending=self.is_ending)

    def _report_opened(self) -> None:
        if self._delivery.run.run_id and not self._is_opened:
            self._is_opened = True
            if not self.is_ending.is_set():  # whose outcome names the run
                self._opened()

    def _next_batch(self) -> list[AnyEvent] | None:
        """Collect events of about a second, at first those there are; empty if files are due first, None at the end."""
        if not self._is_kept:
            return self._until_first_step()
        batch: list[AnyEvent] = []
        points, deadline = 0, self._upload_at if self._delivery.run.uploads else None
        while points < _BATCH_POINTS:
            try:
                event = self._feed.get(timeout_s=None if deadline is None else max(0.0, deadline - monotonic()))
            except TimeoutError:
                break
            if event is None:
                return batch or None
            if not batch:  # the run itself doesn't wait for more, so that its page is there early
                deadline = monotonic() + (_BATCH_S if self._delivery.run.run_id else 0.0)
            batch.append(event)
            points += len(event.points) if isinstance(event, Metrics | SystemMetrics) else 1
        return batch

    def _until_first_step(self) -> list[AnyEvent] | None:
        """Collect the events up to the first step; None if the run ends before, which leaves nothing in the store."""
        batch: list[AnyEvent] = []
        while (event := self._feed.get()) is not None:
            batch.append(event)
            if isinstance(event, RunOpened):
                with suppress(Exception):  # takes a second, while workers start; the delivery reports an error
                    create_store(self._uri or event.tracking_uri)
            if is_reason_to_keep(event):
                self._is_kept = True
                return batch
        return None

"""Getting events into MLflow while its store comes and goes: what is an outage, what is a refusal, and who is told."""

import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event as Flag

from pipeline.config.uris import without_credentials
from pipeline.protocol.events import AnyEvent, Metrics, SystemMetrics
from pipeline.protocol.progress import ProgressReporter
from pipeline.recording.journal import FILE_NAME
from pipeline.recording.mlflow_run import MlflowRun
from pipeline.recording.store import redacted

_ENVIRONMENT = {
    # MLflow's own defaults let one call to a dead server block for four minutes; we try again ourselves.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
_TRY_AGAIN = {401, 403, 408, 429}  # credentials can be mended while the run goes on
BATCH_POINTS = 1000
"""Metric points that go into one call."""
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0)  # between attempts during an outage; the last one again and again
_LAST_ATTEMPTS = 3  # once the run has ended, nobody waits longer for a store that is down


class Outage:
    """Tells once when MLflow stops taking results or files, and once when it takes them again.

    Args:
        what: "results" or "files".
        uri: of the store; may be empty.
        place: where they wait.
        warn: told.
    """

    def __init__(self, what: str, *, uri: str, place: Path, warn: Callable[[str], None]) -> None:
        self.reason = ""
        """Why MLflow doesn't take them; empty if it does."""
        self._what = what
        self._at = f" at {without_credentials(uri)}" if uri else ""
        self._place = place
        self._warn = warn

    def begin(self, reason: str) -> None:
        """MLflow doesn't take them."""
        if not self.reason:
            waiting = f"nothing is lost, they wait in {self._place}"
            self._warn(f"MLflow{self._at} takes no {self._what} ({reason}); {waiting}")
        self.reason = reason

    def end(self) -> None:
        """MLflow takes them."""
        if self.reason:
            self._warn(f"MLflow takes {self._what} again; those that waited are there now")
        self.reason = ""


class Delivery:
    """Writes events and files to MLflow. Used by one thread.

    Args:
        folder: the run's folder.
        warn: told once when MLflow stops taking events or files, once when it takes them again, and of each kind of
            refusal.
        uri: the store, credentials included; empty for the one that the events name.
    """

    def __init__(self, *, folder: Path, warn: Callable[[str], None], uri: str = "") -> None:
        self.run = MlflowRun(folder=folder, warn=warn, uri=uri)
        self.refused = 0
        """Events that MLflow will never take."""
        self._warn = warn
        self._told: set[str] = set()
        self._results = Outage("results", uri=uri, place=folder / FILE_NAME, warn=warn)
        self._files = Outage("files", uri=uri, place=folder, warn=warn)

    @property
    def trouble(self) -> str:
        """Why the last attempt failed; empty if it didn't."""
        return self._results.reason or self._files.reason

    def attempt(self, events: Sequence[AnyEvent]) -> bool:
        """Write events; False if they must be written again later."""
        try:
            self._write(events)
        # No traceback goes to the log, here and below: exceptions of stores quote addresses with their passwords.
        except Exception as error:  # noqa: BLE001 - nothing that happens to tracking may reach training
            self.fail(error)
            return False
        self._results.end()
        return True

    def upload(self) -> bool:
        """Upload the files that are due; False if there are some that must be tried again later."""
        with ProgressReporter("sending files", total=len(self.run.uploads) or None, unit="files") as progress:
            while uploads := self.run.uploads:
                try:
                    self.run.upload(uploads[0])
                except Exception as error:  # noqa: BLE001 - nothing that happens to tracking may reach training
                    if _is_outage(error):
                        self._files.begin(_reason(error))
                        return False
                    self._refuse(uploads[0], _reason(error))
                uploads.popleft()
                progress.by(1)
        self._files.end()
        return True

    def fail(self, error: Exception) -> None:
        """Take note that events could not be written; the first time in a row, tell."""
        self._results.begin(_reason(error))

    def _write(self, events: Sequence[AnyEvent]) -> None:
        """Write all events; if MLflow refuses one of them for good, all the others."""
        try:
            self.run.write(events)
        except Exception as error:
            if not self.run.run_id or _is_outage(error):
                raise
            if len(events) > 1:
                for event in events:
                    self._write([event])
            else:
                self._refuse(events[0], _reason(error))

    def _refuse(self, event: AnyEvent, reason: str) -> None:
        self.refused += 1
        if reason not in self._told:
            self._told.add(reason)
            self._warn(f"MLflow refuses a {event.kind} event: {reason}")


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


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what MLflow logs and warns about in this thread off the terminal; its exceptions tell us the same.

    It also shortens MLflow's patience, unless the user has set it.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Not with catch_warnings, which isn't safe beside other threads. MLflow 3.17 on SQLAlchemy 2.1.
    warnings.filterwarnings(
        "ignore", message=r"The ``noload`` loader strategy is deprecated", category=DeprecationWarning
    )
    import mlflow  # noqa: F401 - its loggers get their handlers here

    here = _NotHere(threading.get_ident())
    places = [*logging.getLogger("mlflow").handlers, logging.getLogger("urllib3.connectionpool")]
    for place in places:
        place.addFilter(here)
    try:
        yield
    finally:
        for place in places:
            place.removeFilter(here)


class _NotHere(logging.Filter):
    """Drops the records of one thread."""

    def __init__(self, thread: int) -> None:
        super().__init__()
        self._thread = thread

    def filter(self, record: logging.LogRecord) -> bool:
        return record.thread != self._thread


def _reason(error: BaseException) -> str:
    """The first cause in one line; what MLflow wraps around it names no more than the address."""
    hint = "; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD" if _http_status(error) == 401 else ""
    while cause := error.__cause__ or error.__context__:
        error = cause
    line = (str(error) or type(error).__name__).partition("\n")[0]
    return redacted(line)[:300] + hint


def _is_outage(error: Exception) -> bool:
    """Whether the same event may be taken later, in contrast to one that MLflow finds wrong."""
    from sqlalchemy.exc import OperationalError

    if (status := _http_status(error)) is not None:
        return status >= 500 or status in _TRY_AGAIN
    return isinstance(error, OSError | OperationalError)


def _http_status(error: BaseException) -> int | None:
    """The server's answer, or the one that MLflow's own client would give for what happened."""
    if "mlflow" not in sys.modules:  # it can't be imported: that is the error
        return None
    from mlflow.exceptions import MlflowException
    from requests import HTTPError

    if isinstance(error, MlflowException):
        return int(error.get_http_status_code())
    return error.response.status_code if isinstance(error, HTTPError) and error.response is not None else None

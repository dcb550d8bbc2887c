"""Getting events into MLflow while its store comes and goes: what is an outage, what is a refusal, and who is told."""

import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pipeline.events import AnyEvent, RunOpened
from pipeline.recording.journal import FILE_NAME
from pipeline.recording.mlflow_run import MlflowRun
from pipeline.recording.store import without_credentials

_ENVIRONMENT = {
    # MLflow's own defaults let one call to a dead server block for four minutes; we try again ourselves.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
_TRY_AGAIN = {401, 403, 408, 429}  # credentials can be mended while the run goes on


class Delivery:
    """Writes events to MLflow. Used by one thread.

    Args:
        folder: the run's folder.
        warn: told once when MLflow stops taking events, once when it takes them again, and of each kind of refusal.
    """

    def __init__(self, *, folder: Path, warn: Callable[[str], None]) -> None:
        self.run = MlflowRun(folder=folder, warn=warn)
        self.trouble = ""
        """Why the last attempt failed; empty if it didn't."""
        self.refused = 0
        """Events that MLflow will never take."""
        self._warn = warn
        self._told: set[str] = set()
        self._uri = ""

    def attempt(self, events: Sequence[AnyEvent]) -> bool:
        """Write events; False if they must be written again later."""
        self._uri = next((event.tracking_uri for event in events if isinstance(event, RunOpened)), self._uri)
        try:
            self._write(events)
        except Exception as error:  # noqa: BLE001 - nothing that happens to tracking may reach training
            self.fail(error)
            return False
        if self.trouble:
            self._warn("MLflow takes results again; those that waited are there now")
        self.trouble = ""
        return True

    def fail(self, error: Exception) -> None:
        """Take note that events could not be written; the first time in a row, tell."""
        reason = self._reason(error)
        if not self.trouble:
            self._warn(
                f"MLflow at {without_credentials(self._uri)} takes no results ({reason}); nothing is lost, "
                f"they wait in {self.run.folder / FILE_NAME}"
            )
        self.trouble = reason

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
                self._refuse(events[0], self._reason(error))

    def _refuse(self, event: AnyEvent, reason: str) -> None:
        self.refused += 1
        if reason not in self._told:
            self._told.add(reason)
            self._warn(f"MLflow refuses a {event.kind} event: {reason}")

    def _reason(self, error: BaseException) -> str:
        """The first cause in one line; what MLflow wraps around it names no more than the address."""
        while cause := error.__cause__ or error.__context__:
            error = cause
        line = (str(error) or type(error).__name__).partition("\n")[0]
        return line.replace(self._uri, without_credentials(self._uri))[:300] if self._uri else line[:300]


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


def _is_outage(error: Exception) -> bool:
    """Whether the same event may be taken later, in contrast to one that MLflow finds wrong."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException):
        code = error.get_http_status_code()
        return code >= 500 or code in _TRY_AGAIN
    return isinstance(error, OSError)

"""Delivery of events to MLflow: an outage of the store, after which they are sent again, differs from a refusal."""

import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from threading import Event as Flag

from rich.filesize import decimal

from pipeline.experiment.uris import without_credentials, without_credentials_in
from pipeline.protocol.events import AnyEvent, ArtifactSaved, ModelSaved
from pipeline.protocol.progress import ProgressReporter
from pipeline.record.journal import FILE_NAME
from pipeline.tracking.mlflow.mlflow_run import MlflowRun
from pipeline.wording import counted

_ENVIRONMENT = {
    # MLflow's defaults let one call to a dead server block for four minutes; `persist` retries instead.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
_TRY_AGAIN = {401, 403, 408, 429}  # wrong credentials can be replaced during the run
_PACKAGES = {
    "boto3": "boto3",
    "google": "google-cloud-storage",
    "azure": "azure-storage-blob azure-identity",
    "psycopg2": "psycopg2-binary",
    "pymysql": "pymysql",
    "MySQLdb": "mysqlclient",
}
"""Packages that stores need besides MLflow, by the module that can't be imported."""
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0)  # between attempts during an outage; the last is repeated
_LAST_ATTEMPTS = 3  # after the end of the run


class Outage:
    """Warnings of an outage: one when MLflow stops accepting results or files, one when it accepts them again.

    Args:
        what: "results" or "files".
        uri: URI of the store; may be empty.
        place: file or folder where they wait.
        warn: called with each warning.
    """

    def __init__(self, what: str, *, uri: str, place: Path, warn: Callable[[str], None]) -> None:
        self.reason = ""
        """Reason of the outage; empty if there is none."""
        self._what = what
        self._at = f" at {without_credentials(uri)}" if uri else ""
        self._place = place
        self._warn = warn

    def begin(self, reason: str) -> None:
        """Begin the outage, or replace its reason."""
        if not self.reason:
            waiting = f"Nothing is lost: they wait in {self._place}"
            self._warn(f"MLflow{self._at} doesn't accept {self._what} ({reason}). {waiting}")
        self.reason = reason

    def end(self) -> None:
        """End the outage, if there is one."""
        if self.reason:
            self._warn(f"MLflow accepts {self._what} again. All {self._what} that waited were sent.")
        self.reason = ""


class Delivery:
    """Writer of events and files to MLflow, for one thread.

    Args:
        folder: the run's folder.
        warn: called when an outage starts and when it ends, and once for each reason of a refusal.
        uri: URI of the store with credentials; empty for the URI in the run's first event.
        adds: True if the run has ended, and keeps its status.
    """

    def __init__(self, *, folder: Path, warn: Callable[[str], None], uri: str = "", adds: bool = False) -> None:
        self.run = MlflowRun(folder=folder, warn=warn, uri=uri, adds=adds)
        self.refused = 0
        """Number of events that MLflow has refused for good."""
        self._warn = warn
        self._told: set[str] = set()
        self._results = Outage("results", uri=uri, place=folder / FILE_NAME, warn=warn)
        self._files = Outage("files", uri=uri, place=folder, warn=warn)

    @property
    def trouble(self) -> str:
        """Reason of the current outage; empty if there is none."""
        return self._results.reason or self._files.reason

    def waiting(self, events: int) -> str:
        """Describe what MLflow lacks, given a number of events, e.g. "12 events and 3 files"; empty if nothing.

        A file that is the last one is named with its size, since a model may take minutes: "1 file: model (2.8 MB)".
        """
        files = tuple(self.run.uploads)  # at once: another thread may upload them
        counts = {"event": events, "file": len(files)}
        text = " and ".join(counted(count, noun, spec=",") for noun, count in counts.items() if count)
        return text if events or len(files) != 1 else f"{text}: {self._named(files[0])}"

    def _named(self, file: ArtifactSaved | ModelSaved) -> str:
        folder, name, path = self.run.folder, "model", ""
        if isinstance(file, ArtifactSaved):
            name = path = file.path
        else:
            path = str(PurePosixPath(PurePosixPath(file.run).name, file.weights))
        try:
            return f"{name} ({decimal((folder / path).stat().st_size)})"
        except OSError:
            return name

    def attempt(self, events: Sequence[AnyEvent]) -> bool:
        """Write events; return False if they must be written again later."""
        try:
            self._write(events)
        # No traceback goes to the log, here and below: exceptions of stores quote URIs with their passwords.
        except Exception as error:  # noqa: BLE001 - nothing that happens to tracking may reach training
            self.fail(error)
            return False
        self._results.end()
        return True

    def upload(self) -> bool:
        """Upload the files that are due; return False if the rest must be uploaded again later."""
        with ProgressReporter("sending files", total=len(self.run.uploads) or None, unit="files") as progress:
            while uploads := self.run.uploads:
                try:
                    self.run.upload(uploads[0])
                except Exception as error:  # noqa: BLE001 - nothing that happens to tracking may reach training
                    # Of a file, MLflow's answer alone is final; e.g. a package for the artifact store can be installed.
                    if _http_status(error) is None or _is_outage(error):
                        self._files.begin(describe_failure(error))
                        return False
                    self._refuse(uploads[0], describe_failure(error))
                uploads.popleft()
                progress.by(1)
        self._files.end()
        return True

    def fail(self, error: BaseException) -> None:
        """Start an outage: events could not be written."""
        self._results.begin(describe_failure(error))

    def _write(self, events: Sequence[AnyEvent]) -> None:
        """Write all events except those that MLflow refuses for good."""
        try:
            self.run.write(events)
        except Exception as error:
            if not self.run.run_id or _is_outage(error):
                raise
            if len(events) > 1:
                for event in events:
                    self._write([event])
            else:
                self._refuse(events[0], describe_failure(error))

    def _refuse(self, event: AnyEvent, reason: str) -> None:
        self.refused += 1
        if reason not in self._told:
            self._told.add(reason)
            self._warn(f"MLflow rejected an event of kind {event.kind}: {reason}")


def persist(attempt: Callable[[], bool], *, ending: Flag) -> bool:
    """Repeat an attempt until it succeeds; return False if it still fails after the end of the run."""
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


@contextmanager
def quiet() -> Iterator[None]:
    """Keep MLflow's log lines and warnings of this thread off the terminal; its exceptions say the same.

    It also shortens MLflow's timeouts and retries, unless the user has set them.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Not with catch_warnings, which isn't safe beside other threads. MLflow 3.17 on SQLAlchemy 2.1.
    warnings.filterwarnings(
        "ignore", message=r"The ``noload`` loader strategy is deprecated", category=DeprecationWarning
    )
    import mlflow  # noqa: F401 - its loggers get their handlers here

    thread = threading.get_ident()

    def elsewhere(record: logging.LogRecord) -> bool:
        return record.thread != thread

    places = [*logging.getLogger("mlflow").handlers, logging.getLogger("urllib3.connectionpool")]
    for place in places:
        place.addFilter(elsewhere)
    try:
        yield
    finally:
        for place in places:
            place.removeFilter(elsewhere)


def describe_failure(error: BaseException) -> str:
    """Return the first cause of an exception in one line; MLflow's own exceptions around it add only the URI."""
    hint = "; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD" if _http_status(error) == 401 else ""
    while cause := error.__cause__ or error.__context__:
        error = cause
    if isinstance(error, ModuleNotFoundError) and (package := (error.name or "").partition(".")[0]) in _PACKAGES:
        hint = f"; pip install {_PACKAGES[package]}"
    text = str(error) if isinstance(error, Exception) else repr(error)  # SystemExit(0), which is "0" as text
    line = (text or type(error).__name__).partition("\n")[0]
    return without_credentials_in(line)[:300] + hint


def _is_outage(error: Exception) -> bool:
    """Return True if the same event may be accepted later, False if MLflow has rejected it as invalid."""
    if (status := _http_status(error)) is not None:
        return status >= 500 or status in _TRY_AGAIN
    with suppress(ImportError):
        from sqlalchemy.exc import OperationalError

        if isinstance(error, OperationalError):
            return True
    return isinstance(error, OSError | ImportError)


def _http_status(error: BaseException) -> int | None:
    """Return the HTTP status of a store's answer, or the status that MLflow's client assigns to the error."""
    try:
        from mlflow.exceptions import MlflowException
        from requests import HTTPError
    except BaseException:  # noqa: BLE001 - whatever a file raises that hides MLflow; the given error names it
        return None

    if isinstance(error, MlflowException):
        return int(error.get_http_status_code())
    return error.response.status_code if isinstance(error, HTTPError) and error.response is not None else None

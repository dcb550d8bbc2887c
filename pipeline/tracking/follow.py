"""``python -m pipeline.tracking.follow RUN``: sends a run to MLflow and the loggers while its journal grows.

``pipeline sync`` is the same code for a run that has ended. The journal is read from the offset in ``sync.json``, which
is written after each call of MLflow, so that a kill at any moment repeats one call; MLflow stores equal points once.
"""

import argparse
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event as Flag
from threading import Lock, Thread
from typing import Any

from pipeline.errors import ResourceError, UsageError
from pipeline.experiment.uris import without_credentials, without_credentials_in
from pipeline.protocol.events import AnyEvent, RunClosed, RunOpened, event_from_json, is_reason_to_keep
from pipeline.protocol.progress import ProgressReporter
from pipeline.record import journal
from pipeline.record.folder import is_kept, killed, trials_of
from pipeline.tracking import loggers
from pipeline.tracking.mlflow import METRICS_PER_CALL, MlflowRun
from pipeline.tracking.store import (
    TrackingOutcome,
    check_store,
    create_store,
    is_server,
    link_of,
    run_link,
    with_credentials,
)
from pipeline.wording import counted, join_names

INCOMPLETE = 3  # Exit code if something was not delivered
UNKNOWN_END = b"\n"  # Line of standard input if no end of the run is known
_ENVIRONMENT = {
    # MLflow's defaults let one call to a dead server block for four minutes; a delivery is repeated instead.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
_TRY_AGAIN = {401, 403, 408, 429}  # wrong credentials can be replaced during the run
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0)  # between attempts during an outage; the last is repeated
_LAST_ATTEMPTS, _LOOK_S = 3, 0.5  # after the end of the run; between two looks at the journal


class _IncompleteError(Exception):
    """The store refuses results after the end of the run."""


class Delivery:
    """Delivery of a run's journal to MLflow, for one thread; ``opened`` is called once, before the run's end."""

    def __init__(
        self,
        folder: Path,
        *,
        uri: str,
        sent: TrackingOutcome,
        warn: Callable[[str], None],
        keeps: bool = True,
        opened: Callable[[], None] = lambda: None,
    ) -> None:
        self.sent = sent
        self.ending = Flag()  # Set once the journal is complete; from then on an attempt is repeated only a few times
        self.end: RunClosed | None = None
        """End of the run, in case that the journal lacks it: the disk was full, or the driver was killed."""
        self._folder, self._uri, self._warn, self._keeps, self._opened = folder, uri, warn, keeps, opened
        self._run: MlflowRun
        self._down: dict[str, str] = {}  # Reasons why the store refuses "results" or "files" now
        self._told: set[str] = set()

    def start_loggers(
        self, names: Sequence[str], *, tell: Callable[[str, str], None], with_own: bool = False
    ) -> list[loggers.Logger]:
        """Start the loggers of the run, which end when it has ended; see `loggers.start`."""
        is_over, folder = self.ending.is_set, self._folder
        return loggers.start(names, folder, with_own=with_own, tell=tell, is_over=is_over, end=lambda: self.end)

    def send(self, *, only_first: bool = False) -> bool:
        """Send everything until `ending`, or the first event; return False if something is missing."""
        is_complete = False
        try:
            with quiet():
                is_complete = self._deliver(only_first=only_first)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever MLflow or a library raises; else nothing reports the end
            with suppress(Exception):
                self.sent.trouble = self.sent.trouble or describe_failure(error)
        sent, folder = self.sent, self._folder
        if not is_complete:
            sent.trouble = sent.trouble or "the delivery ended early"
            sent.fail(folder, trouble=sent.trouble, what=sent.waiting(folder) or "some results")
        elif not only_first:
            refused = f"MLflow rejected {counted(sent.refused, 'event')}, kept in {folder / journal.FILE_NAME}"
            sent.delivered, sent.message = True, refused if sent.refused else ""
        elif not sent.delivered:
            sent.fail(folder)
        self._keep()
        return is_complete

    def _deliver(self, *, only_first: bool) -> bool:
        path = self._folder / journal.FILE_NAME
        while not self.sent.offset:  # a run without a step leaves nothing in the store
            is_over = self.ending.is_set()  # asked before the last look, here and below
            if is_kept(self._folder) or (self.end is not None and is_reason_to_keep(self.end)):
                break
            if is_over:
                return True
            if journal.opened(path) is not None:
                with suppress(Exception):  # takes a second, while workers start; the first call reports an error
                    create_store(self._uri)
            self.ending.wait(_LOOK_S)
        try:
            self._persist(lambda: self._try("results", lambda _: self._connect()))
            tail = journal.Tail(path, offset=self.sent.offset)
            if only_first:
                if not self.sent.offset:
                    self._write([next(tail.new())], tail.offset)
                return True
            begun, size = tail.offset, path.stat().st_size - tail.offset if path.exists() else 0
            with ProgressReporter("sending results", total=size or None, unit="B") as progress:
                while True:
                    is_over = self.ending.is_set()
                    for batch, offset in _batches(tail):
                        self._write(batch, offset)
                        progress.to(offset - begun)
                    self._accepts("results")
                    if is_over:
                        break
                    self._upload()  # what fails is tried again after the next results
                    self.ending.wait(_LOOK_S)
            if self.end is not None and not self.sent.is_closed:
                self._write([self.end], self.sent.offset)
            self._persist(self._upload)
        except _IncompleteError:
            return False
        return True

    def _connect(self) -> None:
        """Start at the state that was kept, or at the start of the journal if the store doesn't have the run."""
        from mlflow import MlflowClient

        create_store(self._uri)
        client = MlflowClient(tracking_uri=self._uri, registry_uri=self._uri)
        opened = journal.opened(self._folder / journal.FILE_NAME)
        assert opened is not None
        self._run = MlflowRun(self._folder, client=client, opened=opened, sent=self.sent, warn=self._warn)
        if self.sent.run_id and not self._run.is_known():
            self.sent = self._run.sent = TrackingOutcome(uri=self.sent.uri)

    def _write(self, events: Sequence[AnyEvent], offset: int) -> None:
        """Write events, and note that they end at this offset."""
        self._persist(lambda: self._try("results", self._run.write, events))
        self.sent.offset, self.sent.is_closed = offset, isinstance(events[-1], RunClosed)
        self._keep()
        if self.sent.run_id and not self.ending.is_set():
            self._opened()
            self._opened = lambda: None

    def _upload(self) -> bool:
        """Upload the files that are due; return False if the rest must be uploaded again later."""
        sent = self.sent
        with ProgressReporter("sending files", total=len(sent.uploads) or None, unit="files") as progress:
            while sent.uploads:
                if not self._try("files", lambda files: self._run.upload(files[0]), sent.uploads[:1]):
                    return False
                sent.uploads.pop(0)
                self._keep()
                progress.by(1)
        self._accepts("files")
        return True

    def _try(self, what: str, send: Callable[[Sequence[Any]], object], events: Sequence[AnyEvent] = ()) -> bool:
        """Send events; return False if they must be sent again. Those that MLflow rejects for good are left out."""
        try:
            send(events)
        # No traceback goes to the log: exceptions of stores quote URIs with their passwords.
        except Exception as error:  # noqa: BLE001 - nothing that happens to tracking may reach training
            reason = describe_failure(error)
            # Of a file, MLflow's answer alone is final; e.g. a package for the artifact store can be installed.
            is_answer = self.sent.run_id if what == "results" else _http_status(error) is not None
            if not events or not is_answer or _is_outage(error):
                if what not in self._down:
                    at = f" at {without_credentials(self._uri)}" if self._uri else ""
                    place = self._folder / journal.FILE_NAME if what == "results" else self._folder
                    self._warn(f"MLflow{at} doesn't accept {what} ({reason}). Nothing is lost: they wait in {place}")
                self._down[what] = self.sent.trouble = reason
                self._keep()
                return False
            if len(events) > 1:
                return all(self._try(what, send, [event]) for event in events)
            self.sent.refused += 1
            if reason not in self._told:
                self._told.add(reason)
                self._warn(f"MLflow rejected an event of kind {events[0].kind}: {reason}")
        return True

    def _accepts(self, what: str) -> None:
        if self._down.pop(what, None) is not None:
            self._warn(f"MLflow accepts {what} again. All {what} that waited were sent.")
            self.sent.trouble = next(iter(self._down.values()), "")

    def _persist(self, attempt: Callable[[], bool]) -> None:
        """Repeat an attempt until it succeeds, after the end of the run a few times."""
        attempts = last_attempts = 0
        while not attempt():
            if self.ending.is_set():
                last_attempts += 1
                if last_attempts == _LAST_ATTEMPTS:
                    raise _IncompleteError
                time.sleep(_PAUSES_S[0])
            else:
                self.ending.wait(_PAUSES_S[min(attempts, len(_PAUSES_S) - 1)])
            attempts += 1

    def _keep(self) -> None:
        if not self.ending.is_set():
            self.sent.fail(self._folder)
        if self._keeps:
            with suppress(OSError):  # a full disk or a deleted folder, which the driver reports; a read-only folder
                self.sent.keep(self._folder)


def _batches(tail: journal.Tail) -> Iterator[tuple[list[AnyEvent], int]]:
    """Yield the new events with about as many points as one call may have, and where in the journal they end."""
    batch: list[AnyEvent] = []
    points = 0
    for event in tail.new():
        batch.append(event)
        points += len(getattr(event, "points", ())) or 1
        if points >= METRICS_PER_CALL:
            yield batch, tail.offset
            batch, points = [], 0
    if batch:
        yield batch, tail.offset


@contextmanager
def quiet() -> Iterator[None]:
    """Keep MLflow's log lines and warnings off the terminal, and its timeouts short."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Not with catch_warnings, which isn't safe beside other threads. MLflow 3.17 on SQLAlchemy 2.1.
    warnings.filterwarnings(
        "ignore", message=r"The ``noload`` loader strategy is deprecated", category=DeprecationWarning
    )
    import mlflow  # noqa: F401 - its loggers get their levels here

    levels = {name: logging.getLogger(name).level for name in ("mlflow", "urllib3.connectionpool")}
    for name in levels:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def describe_failure(error: BaseException) -> str:
    """Return the first cause of an exception in one line; MLflow's own exceptions around it add only the URI."""
    hint = "; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD" if _http_status(error) == 401 else ""
    while cause := error.__cause__ or error.__context__:
        error = cause
    text = str(error) if isinstance(error, Exception) else repr(error)  # SystemExit(0), which is "0" as text
    return without_credentials_in((text or type(error).__name__).partition("\n")[0])[:300] + hint


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
    except ImportError:
        return None

    if isinstance(error, MlflowException):
        return int(error.get_http_status_code())
    return error.response.status_code if isinstance(error, HTTPError) and error.response is not None else None


def sync(folder: Path, *, warn: Callable[[str], None], to: str = "", only_first: bool = False) -> TrackingOutcome:
    """Send what MLflow lacks of a finished or killed run, and all of it to its named loggers.

    If the journal lacks the end of the run, its MLflow runs end as KILLED at the time of its last event.

    ``to`` is the URI of another store, with credentials, in place of its own and its loggers. With ``only_first`` the
    run is opened and no more.
    """
    path = folder / journal.FILE_NAME
    opened, last = None, None
    for event in journal.read(path):  # one event in memory at a time
        opened, last = (event if isinstance(event, RunOpened) else opened), event
    if journal.is_open(path):
        writer = journal.describe_writer(path)
        raise UsageError(
            f"{folder}: this run is still running in {writer} and sends its results itself. Sync it after it has ended."
        )
    if opened is None or last is None:
        raise UsageError(f"{path}: nothing to send, because the run ended before it started")
    if not is_kept(folder):
        raise UsageError(f"{folder}: nothing to send, because the run ended before its first step")
    end = journal.ending(path) or killed(at=last.time)
    own = with_credentials(opened.tracking_uri)
    uri = to or own
    try:
        check_store(uri)  # a server that doesn't answer now is tried anyway
    except ResourceError as error:
        raise ResourceError(f"{error}\nOr send it to another store: pipeline sync {folder} --to URI") from error
    other = "" if uri == own else without_credentials(uri)
    known = TrackingOutcome.read(folder)
    sent = known if known and known.uri == other else TrackingOutcome(uri=other)
    sent.trouble = ""
    if sent.refused or sent.missing:  # all is sent again, e.g. where a trial is there now, or more memory is free
        sent.offset, sent.refused, sent.missing = 0, 0, []
    keeps = not (other and known and known.delivered)  # links stay on the run's own store
    delivery = Delivery(folder, uri=uri, sent=sent, warn=warn, keeps=keeps)
    delivery.end = end
    delivery.ending.set()
    names = () if to or only_first else opened.also
    started = delivery.start_loggers(names, tell=lambda _, text: warn(text) if text else None)
    is_complete = delivery.send(only_first=only_first)
    for logger in started:
        logger.join()
    outcome = delivery.sent.model_copy()
    if is_complete and not outcome.message:
        what = f"all of {folder}{f' except {join_names(outcome.missing)}' if outcome.missing else ''}"
        outcome.message = f"{what} is in MLflow: {run_link(uri, outcome.experiment_id, outcome.run_id)}"
    if any(logger.has_failed for logger in started):  # a warning has named it
        outcome.delivered = False
    return outcome


def sync_with_trials(folder: Path, *, warn: Callable[[str], None], to: str = "") -> Iterator[TrackingOutcome]:
    """Send a run and, if it is a sweep, its trials; stop at the first incomplete delivery. See `sync`.

    A trial's MLflow run needs its sweep's as parent, and the sweep's tags about trials need the trials' runs.
    """
    trials = [trial for trial in trials_of(folder) if journal.opened(trial / journal.FILE_NAME)]
    if trials and (begun := sync(folder, warn=warn, to=to, only_first=True)).trouble:
        yield begun
        return
    for each in (*trials, folder):
        outcome = sync(each, warn=warn, to=to)
        yield outcome
        if not outcome.delivered:
            return


def main() -> None:
    """Follow the journal of a run until its driver says that it has ended, in a line of standard input.

    Standard output is for the driver: lines that begin with ``warn``, ``opened`` or ``done``. A driver that was killed
    closes standard input; then this process ends at once, since the run may be resumed.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--logger", action="append", default=[], help="logger in addition to MLflow")
    parser.add_argument("--own", action="store_true", help="also the loggers that the experiment defines")
    given = parser.parse_args()
    folder, uri = given.run, os.environ["MLFLOW_TRACKING_URI"]  # in the environment, since it may have a password
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a job's goes to all its processes, and the run's end is yet to come
    stdout, lock = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1), Lock()
    os.dup2(2, 1)  # what libraries print goes to the run's log
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    def say(kind: str, text: str) -> None:
        with lock, suppress(OSError):  # the driver has stopped waiting
            stdout.write(f"{kind} {' '.join(text.splitlines())}\n")

    def opened() -> None:
        if is_server(uri):  # the UI of another store has to be started first
            say("opened", link_of(uri, delivery.sent))

    sent = TrackingOutcome.read(folder) or TrackingOutcome()
    if sent.uri:  # of another store, to which the run was sent meanwhile
        sent = TrackingOutcome()
    sent.trouble = ""
    delivery = Delivery(folder, uri=uri, sent=sent, warn=lambda text: say("warn", text), opened=opened)
    started = delivery.start_loggers(
        given.logger, with_own=given.own, tell=lambda name, text: say("warn" if text else "done", text or name)
    )
    Thread(target=_await_end, args=(delivery,), daemon=True).start()
    is_complete = delivery.send()
    say("done", "MLflow")
    for logger in started:
        logger.join()
    sys.stdout.flush()
    os._exit(0 if is_complete else INCOMPLETE)  # at once: the driver waits, and all of MLflow would be looked through


def _await_end(delivery: Delivery) -> None:
    line = sys.stdin.buffer.readline()
    if not line:
        os._exit(1)  # the driver was killed; --resume or sync sends the rest
    event = None if line == UNKNOWN_END else event_from_json(line)
    delivery.end = event if isinstance(event, RunClosed) else None
    delivery.ending.set()


if __name__ == "__main__":
    main()

"""Driver's side of the process that sends a live run to MLflow, which keeps failures of the store away from training.

The process, see `pipeline.tracking.mlflow.follow`, reads the run's journal and sends it. A thread would share the
interpreter lock with training while it imports MLflow and writes. Results that aren't delivered by the end are in the
journal; `pipeline.tracking.mlflow.sync` sends them later.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Event as Flag
from threading import Thread
from typing import IO, NamedTuple

import rich.console

from pipeline.protocol.events import AnyEvent, RunClosed, event_to_json
from pipeline.record.folder import is_kept
from pipeline.record.recorder import Recorder
from pipeline.system import stages
from pipeline.tracking.mlflow.follow_task import INCOMPLETE, UNKNOWN_END, FollowTask
from pipeline.tracking.mlflow.outcome import LINK_LABEL, TrackingOutcome
from pipeline.tracking.mlflow.store import is_server
from pipeline.wording import join_names

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import pipeline.tracking.mlflow.follow as f; f.main()"
)
"""Program of the process. Python runs it with -P, which imports nothing from the working folder before."""
_STOP = b""
_DRAIN_SECONDS = 60.0
_SILENT_SECONDS = 15.0  # of the drain, before a warning says what the run waits for
_LOOK_SECONDS = 0.25
_begun: list["_Process"] = []


class _Process(NamedTuple):
    """The process, and its output before its task names the log file."""

    popen: subprocess.Popen[bytes]
    printed: IO[bytes]


@contextmanager
def head_start(uri: str) -> Iterator[None]:
    """Start the process before there is a run, since importing MLflow takes seconds; end it if no run comes.

    Args:
        uri: URI of the store, as in the experiment.
    """
    store = "mlflow.tracking" if is_server(uri) else "mlflow.store.tracking.sqlalchemy_store"
    with suppress(OSError):  # the run starts it again, and raises
        _begun.append(_process(store))
    try:
        yield
    finally:
        while _begun:
            unused, printed = _begun.pop()
            with unused, printed:
                unused.kill()


class MlflowSubscriber:
    """Subscriber that has a process send the run to its tracking store, and to the named loggers.

    Args:
        folder: the run's folder, with journal and artifacts.
        log: file for the output of the process.
        warn: called from a background thread, once when an outage starts and once when it ends.
        uri: URI of the store with credentials; empty for the URI in the run's first event.
        adds: True if the run has ended, and keeps its status.
        opened: called from a background thread with the address of the run once a server has it, unless that is after
            the run's end.
        loggers: names in ``tracking.loggers``.

    Raises:
        OSError: the process can't be started.
    """

    def __init__(
        self,
        *,
        folder: Path,
        log: Path,
        warn: Callable[[str], None],
        uri: str = "",
        adds: bool = False,
        opened: Callable[[str], None] = lambda _: None,
        loggers: Sequence[str] = (),
    ) -> None:
        self._folder, self._log, self._warn, self._opened = folder, log, warn, opened
        self._unknown = TrackingOutcome(delivered=False, late=("MLflow", *loggers))
        if known := TrackingOutcome.kept(folder):  # of an earlier session
            with suppress(OSError):
                known.mark_unfinished(folder).model_copy(update={"late": self._unknown.late}).keep(folder)
        self._has_end = self._is_stopping = False
        self._done = Flag()
        self._lines: SimpleQueue[bytes] = SimpleQueue()
        environment = FollowTask.encoded(os.environ)
        task = FollowTask(folder=folder, log=log, uri=uri, adds=adds, loggers=tuple(loggers), environment=environment)
        self._lines.put(task.model_dump_json().encode() + b"\n")
        self._process, self._printed = _begun.pop() if _begun else _process()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._threads = [
            Thread(target=self._send, args=(self._process.stdin,), name="to mlflow", daemon=True),
            Thread(target=self._listen, args=(self._process.stdout,), name="from mlflow", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def receive(self, event: AnyEvent) -> None:
        """Pass on the end of the run; the process reads all other events in the journal."""
        if isinstance(event, RunClosed):
            self._end(event_to_json(event) + b"\n")

    def finish(self, timeout_s: float) -> TrackingOutcome | None:
        """Wait until MLflow has accepted or refused all events; no event may follow.

        Returns:
            Outcome of the delivery; None after ``timeout_s`` seconds without, then it may be called again.
        """
        self._end(UNKNOWN_END)
        return self.outcome if self._done.wait(timeout_s) else None

    def close(self) -> None:
        """End the process at once."""
        self._is_stopping = True
        if not self._done.is_set():
            self._process.kill()
        self._lines.put(_STOP)
        for thread in self._threads:
            thread.join()

    @property
    def late(self) -> tuple[str, ...]:
        """Loggers, MLflow among them, that don't have everything yet."""
        return () if self._done.is_set() else self._latest.late

    @property
    def waiting(self) -> str:
        """Amount that MLflow lacks, e.g. "12 events and 3 files left" or "1 file left: model (2.8 MB)"."""
        if "MLflow" not in self._latest.late:
            return "closing"
        amount, colon, name = (self._latest.waiting or "everything").partition(":")
        return f"{amount} left{colon}{name}"

    @property
    def outcome(self) -> TrackingOutcome:
        """Outcome of the delivery so far."""
        latest, is_done = self._latest, self._done.is_set()
        if is_done and self._process.returncode == 0 and not latest.delivered:  # a full disk has no room for it
            return latest.model_copy(update={"delivered": True, "message": ""})
        is_published = latest != self._unknown and not latest.is_unfinished
        if is_published and not (is_done and "MLflow" in latest.late):
            return latest
        trouble = self._ended if is_done else "the run stopped waiting"
        return latest.lacking(latest.waiting or "some results", folder=self._folder, trouble=trouble)

    @property
    def _latest(self) -> TrackingOutcome:
        return TrackingOutcome.kept(self._folder) or self._unknown

    @property
    def _ended(self) -> str:
        return f"the process that sends them ended with exit code {self._process.returncode}"

    def _end(self, line: bytes) -> None:
        if not self._has_end:
            self._has_end = True
            self._lines.put(line)

    def _send(self, stdin: IO[bytes]) -> None:
        try:
            with stdin:
                while (line := self._lines.get()) != _STOP:
                    stdin.write(line)
                    stdin.flush()
        except OSError:
            pass  # the process has ended, which `_listen` notices, too

    def _listen(self, stdout: IO[bytes]) -> None:
        with stdout:
            for line in stdout:
                message = line.decode().rstrip("\n")
                if not message.startswith(LINK_LABEL):
                    self._warn(message)
                elif not self._has_end:  # the run's end names all places
                    self._opened(message)
        code = self._process.wait()
        with self._printed:
            self._printed.seek(0)
            if early := self._printed.read():
                with suppress(OSError), self._log.open("ab") as file:  # a full disk: the journal has raised it
                    file.write(early)
        late = self._latest.late
        if late and code not in (0, INCOMPLETE) and not self._is_stopping:
            verb = "get" if len(late) > 1 else "gets"
            waiting = f"{self._ended}; nothing is lost, they wait in {self._folder}"
            self._warn(f"{join_names(late)} {verb} no more results, {waiting}")
        self._done.set()


def flush(
    tracker: MlflowSubscriber | None,
    recorder: Recorder,
    *,
    console: rich.console.Console,
    warn: Callable[[str], None],
) -> None:
    """Wait until the tracking store has all results, at most a minute or until Ctrl-C; say what is missing then."""
    stages.end()
    try:
        if tracker and not _sent(tracker, _SILENT_SECONDS, console=console) and (late := tracker.late):
            verb = "have" if len(late) > 1 else "has"
            warn(
                f"waiting until {join_names(late)} {verb} everything, {_DRAIN_SECONDS:.0f} seconds at most; "
                f"Ctrl-C ends the wait, pipeline sync {recorder.folder} sends the rest later"
            )
            _sent(tracker, _DRAIN_SECONDS - _SILENT_SECONDS, console=console)
    finally:
        if tracker and (others := [name for name in tracker.late if name != "MLflow"]):  # MLflow's outcome says so
            warn(f"not in {join_names(others)} yet: some results; send them with: pipeline sync {recorder.folder}")
        recorder.close()
        outcome = tracker.outcome if tracker else None
        if tracker:
            tracker.close()
        if outcome:
            with suppress(OSError):  # a full disk or a deleted folder: the journal has raised it
                outcome.keep(recorder.folder)
            if outcome.message and is_kept(recorder.folder):  # else an error names it
                warn(outcome.message)


def _sent(tracker: MlflowSubscriber, timeout_s: float, *, console: rich.console.Console) -> bool:
    """Wait for the tracking store; return True if it has everything. A terminal shows what is missing meanwhile."""
    if not console.is_interactive or console.quiet:
        return tracker.finish(timeout_s) is not None
    deadline = time.monotonic() + timeout_s
    with console.status("sending to MLflow") as status:
        while tracker.finish(_LOOK_SECONDS) is None:
            if late := join_names(tracker.late):  # empty between the last reply and the end of the process
                status.update(f"sending to {late}: {tracker.waiting}")
            if time.monotonic() > deadline:
                return False
    return True


def _process(*modules: str) -> _Process:
    """Start the process, which imports the modules and waits for its task."""
    printed = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
    popen = subprocess.Popen(  # noqa: S603 - our own interpreter
        [sys.executable, "-P", "-c", _START, json.dumps(sys.path), *modules],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=printed,
        start_new_session=True,  # Ctrl-C is for the driver only
    )
    return _Process(popen, printed)

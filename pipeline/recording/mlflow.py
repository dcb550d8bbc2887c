"""MLflow as a subscriber: nothing that happens to the tracking store reaches training, and nothing is lost.

A process of its own, see `pipeline.recording.mlflow_process`, reads the run's journal and writes it to the store. What
it costs to import MLflow, to write and to wait is its own: a thread would share the interpreter's lock with training.
What isn't through at the end is in the journal, and `pipeline.recording.sync` sends it later.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Event as Flag
from threading import Thread
from typing import IO, NamedTuple

from pipeline.protocol.events import AnyEvent, RunClosed, event_to_json
from pipeline.recording.mlflow_process import CLOSE, WriterReply, WriterTask
from pipeline.recording.outcome import TrackingOutcome
from pipeline.recording.store import is_server

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import pipeline.recording.mlflow_process as p; p.main()"
)
"""-P beside it: nothing is imported from the working folder before."""
_STOP = b""
_begun: list["_Process"] = []


class _Process(NamedTuple):
    """The process, and what it printed before it had its order, which says where to."""

    popen: subprocess.Popen[bytes]
    printed: IO[bytes]


@contextmanager
def head_start(uri: str) -> Iterator[None]:
    """Start the process while there is no run yet: it takes it seconds to import MLflow. Ends it if none comes.

    Args:
        uri: of the store, as the experiment has it.
    """
    store = "mlflow.tracking" if is_server(uri) else "mlflow.store.tracking.sqlalchemy_store"
    with suppress(OSError):  # the run will tell
        _begun.append(_process(store))
    try:
        yield
    finally:
        while _begun:
            unused, printed = _begun.pop()
            with unused, printed:
                unused.kill()


class MlflowSubscriber:
    """Sends a run's events to the tracking store that its first event names.

    Args:
        folder: the run's folder, where the journal and the artifacts are.
        log: where the process may write what nobody else wants to hear.
        warn: told of trouble, from a background thread; once when it begins and once when it ends.
        uri: the store, credentials included; empty for the one that the events name.
        known: events that a continued run has in its journal.

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
        known: int = 0,
    ) -> None:
        self._folder, self._log, self._warn = folder, log, warn
        self._said = WriterReply()
        self._is_stopping = False
        self._done = Flag()
        self._orders: SimpleQueue[bytes] = SimpleQueue()
        order = WriterTask(folder=folder, log=log, uri=uri, known=known, environment=WriterTask.encoded(os.environ))
        self._orders.put(order.model_dump_json().encode() + b"\n")
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
        """Hand over the end of the run, which a full journal may lack; returns at once and never raises."""
        if isinstance(event, RunClosed):
            self._orders.put(event_to_json(event) + b"\n")

    def finish(self, timeout_s: float) -> TrackingOutcome | None:
        """Wait until MLflow has everything, or won't take it; no events may come after that.

        Returns:
            What has become of the results; None if ``timeout_s`` seconds are over first. Then it may be called again.
        """
        self._orders.put(CLOSE)  # a second one is not heard
        return self.outcome if self._done.wait(timeout_s) else None

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._is_stopping = True
        if not self._done.is_set():
            self._process.kill()
        self._orders.put(_STOP)
        for thread in self._threads:
            thread.join()

    @property
    def waiting(self) -> str:
        """What MLflow doesn't have yet, e.g. "12 events and 3 files"."""
        return self._said.waiting or "all of it"

    @property
    def outcome(self) -> TrackingOutcome:
        """What has become of the results by now."""
        if self._said.outcome and (self._said.is_done or not self._done.is_set()):
            return self._said.outcome
        trouble = self._ended if self._done.is_set() else "the run didn't wait any longer"
        known = self._said.outcome or TrackingOutcome(delivered=False)
        return known.lacking("some results", folder=self._folder, trouble=trouble)

    @property
    def _ended(self) -> str:
        return f"the process that sends them ended with exit code {self._process.returncode}"

    def _send(self, stdin: IO[bytes]) -> None:
        try:
            with stdin:
                while (line := self._orders.get()) != _STOP:
                    stdin.write(line)
                    stdin.flush()
        except OSError:
            pass  # the process is gone, which `_listen` hears, too

    def _listen(self, stdout: IO[bytes]) -> None:
        with stdout:
            for line in stdout:
                said = WriterReply.model_validate_json(line)
                if said.warning:
                    self._warn(said.warning)
                else:
                    self._said = said
        self._process.wait()
        with self._printed:
            self._printed.seek(0)
            if early := self._printed.read():
                with suppress(OSError), self._log.open("ab") as file:  # a disk without room is told elsewhere
                    file.write(early)
        if not self._said.is_done and not self._is_stopping:
            self._warn(f"MLflow gets no more results, {self._ended}; nothing is lost, they wait in {self._folder}")
        self._done.set()


def _process(*modules: str) -> _Process:
    """Imports the modules, then waits for its order."""
    printed = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
    popen = subprocess.Popen(  # noqa: S603 - our own interpreter
        [sys.executable, "-P", "-c", _START, json.dumps(sys.path), *modules],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=printed,
        start_new_session=True,  # Ctrl-C is for the run, which tells it what that means
    )
    return _Process(popen, printed)

"""Driver's side of the process that sends a live run to MLflow and the loggers, which keeps their failures away.

The process is `pipeline.tracking.follow`. A thread would share the interpreter lock with training while it imports
MLflow and writes. What isn't delivered by the end is in the journal; ``pipeline sync`` sends it later.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event as Flag
from threading import Thread

import rich.console

from pipeline.protocol.events import AnyEvent, RunClosed, event_to_json
from pipeline.record.folder import LOG_NAME, is_kept
from pipeline.record.recorder import Recorder
from pipeline.system import end_stage
from pipeline.tracking.follow import INCOMPLETE, UNKNOWN_END
from pipeline.tracking.store import TrackingOutcome
from pipeline.wording import join_names

_DRAIN_SECONDS, _INTERRUPTED_SECONDS = 60.0, 8.0  # after Ctrl-C or SIGTERM; pipeline sync sends the rest
_SILENT_SECONDS = 15.0  # of the drain, before a warning says what the run waits for


class Follower:
    """Subscriber that has a process send the run to its tracking store, and to its loggers.

    From a background thread it calls ``warn`` when an outage starts and when it ends, and ``opened`` with the address
    of the run once a server has it, unless that is after the run's end. ``own`` are the names of the user's loggers.
    """

    def __init__(
        self,
        folder: Path,
        *,
        uri: str,
        warn: Callable[[str], None],
        opened: Callable[[str], None] = lambda _: None,
        loggers: Sequence[str] = (),
        own: Sequence[str] = (),
    ) -> None:
        self.late = ["MLflow", *dict.fromkeys(loggers), *own]
        """Loggers, MLflow among them, that don't have everything yet."""
        self._folder, self._warn, self._opened = folder, warn, opened
        self._has_end = self._is_stopping = False
        self._done = Flag()
        if known := TrackingOutcome.read(folder):  # of an earlier session
            known.fail(folder)
            with suppress(OSError):
                known.keep(folder)
        command = [sys.executable, "-P", "-m", "pipeline.tracking.follow", str(folder)]
        command += [f"--logger={name}" for name in loggers] + ["--own"] * bool(own)
        paths = os.pathsep.join(path or "." for path in sys.path)
        with (folder / LOG_NAME).open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "MLFLOW_TRACKING_URI": uri, "PYTHONPATH": paths},
                start_new_session=True,  # Ctrl-C is for the driver only
            )
        self._thread = Thread(target=self._listen, name="from mlflow", daemon=True)
        self._thread.start()

    def receive(self, event: AnyEvent) -> None:
        """Pass on the end of the run; the process reads all other events in the journal."""
        if isinstance(event, RunClosed):
            self._end(event_to_json(event) + b"\n")

    def finish(self, timeout_s: float) -> bool:
        """Wait until everything has been accepted or refused, at most so long; no event may follow."""
        self._end(UNKNOWN_END)
        return self._done.wait(timeout_s)

    def close(self) -> TrackingOutcome:
        """End the process at once; return what it has done, which is written into the folder."""
        self._is_stopping = True
        trouble = "the run stopped waiting"
        if self._done.is_set():
            trouble = f"the process that sends them ended with exit code {self._process.returncode}"
        else:
            self._process.kill()
        self._thread.join()
        outcome = TrackingOutcome.read(self._folder) or TrackingOutcome()
        if self._process.returncode == 0:  # even if a full disk had no room to write it down
            outcome.delivered, outcome.message = True, outcome.message if outcome.delivered else ""
        elif self._process.returncode != INCOMPLETE:
            what = outcome.waiting(self._folder) or "some results"
            outcome.fail(self._folder, trouble=outcome.trouble or trouble, what=what)
        with suppress(OSError):  # a full disk or a deleted folder: the journal has raised it
            outcome.keep(self._folder)
        return outcome

    def _end(self, line: bytes) -> None:
        assert self._process.stdin is not None
        if not self._has_end:
            self._has_end = True
            with suppress(OSError, ValueError):  # the process has ended; `_listen` may have closed the pipe
                self._process.stdin.write(line)
                self._process.stdin.flush()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        with self._process.stdout as stdout:
            for line in stdout:
                kind, _, text = line.decode().rstrip("\n").partition(" ")
                if kind == "warn":
                    self._warn(text)
                elif kind == "opened" and not self._has_end:  # the run's end names all places
                    self._opened(text)
                elif kind == "done":
                    self.late = [name for name in self.late if name != text]
        code = self._process.wait()
        with suppress(OSError, ValueError):
            self._process.stdin.close()
        if self.late and code not in (0, INCOMPLETE) and not self._is_stopping:
            verb = "get" if len(self.late) > 1 else "gets"
            ended = f"the process that sends them ended with exit code {code}"
            waiting = f"{ended}; nothing is lost, they wait in {self._folder}"
            self._warn(f"{join_names(self.late)} {verb} no more results, {waiting}")
        self._done.set()


def flush(
    follower: Follower | None, recorder: Recorder, *, console: rich.console.Console, warn: Callable[[str], None]
) -> None:
    """Wait until the tracking store has all results, at most a minute or until Ctrl-C; say what is missing then."""
    end_stage()
    is_interrupted = isinstance(sys.exc_info()[1], KeyboardInterrupt)
    folder, silent_s = recorder.folder, _INTERRUPTED_SECONDS if is_interrupted else _SILENT_SECONDS

    def wait(follower: Follower, timeout_s: float) -> bool:
        if console.quiet or not console.is_interactive:
            return follower.finish(timeout_s)
        with console.status(f"sending to {join_names(follower.late)}"):
            return follower.finish(timeout_s)

    try:
        if follower and not (wait(follower, silent_s) or is_interrupted) and follower.late:
            warn(
                f"waiting until everything is in {join_names(follower.late)}, {_DRAIN_SECONDS:.0f} seconds at most; "
                f"Ctrl-C ends the wait, pipeline sync {folder} sends the rest later"
            )
            wait(follower, _DRAIN_SECONDS - _SILENT_SECONDS)
    finally:
        recorder.close()
        if follower:
            late = [name for name in follower.late if name != "MLflow"]  # of which MLflow's outcome says nothing
            if (message := follower.close().message) and is_kept(folder):  # else an error names it
                warn(message)
            if late:
                warn(f"not in {join_names(late)} yet: some results; send them with: pipeline sync {folder}")

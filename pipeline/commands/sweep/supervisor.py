"""Ray Tune trainable of a trial: starts the trial's process and reports the evaluations in its journal."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ray import tune

from pipeline.commands.sweep.assignment import AFTER_GRACE_S, Assignment, Record, TrialJob
from pipeline.commands.sweep.journals import Evaluation, Follower, Unmeasurable, has_used_resources, state_of
from pipeline.errors import ResourceError
from pipeline.protocol.events import STOPPED_EARLY
from pipeline.recording import journal
from pipeline.recording.folder import trials_of

EPOCH, SUGGESTION, VALUE = "epoch", "suggestion", "value"
OUTPUT_NAME = "output.txt"
"""Name of the file with the output of a trial's process, which is short unless it fails."""
_LOOK_S = 0.1
_AGAIN_S = 10.0
"""Seconds until a trial that lacked resources is tried again: what it lacks may be something else than room."""


class TrialFailed(Exception):
    """Failure of a trial's process, with a message for the user."""


class Supervisor(tune.Trainable):  # type: ignore[misc]  # Ray has no types
    """Actor that starts a trial, reports its evaluations to Ray Tune, and stops it when Tune asks for it.

    A trial that ended in an earlier session is not trained again; the evaluations in its journal are reported.
    """

    def setup(self, config: dict[str, Any], job: str, direction: str) -> None:
        """Take over a trial; ``job`` is a `TrialJob` as JSON."""
        self._job = TrialJob.model_validate_json(job)
        self._minimizes = direction == "min"
        self._suggestion = Record.model_validate_json(config[SUGGESTION])
        self._hash = config["hash"]
        self._folder = self._job.folder_of(self._suggestion.number)
        self._process: subprocess.Popen[bytes] | None = None
        self._last: Evaluation | None = None
        self._told = self._evaluations()

    def step(self) -> dict[str, Any]:
        """Return the next evaluation; after the end of the trial the last evaluation again, marked as done.

        Raises:
            TrialFailed: the trial failed.
        """
        evaluation = next(self._told, None)
        if evaluation is not None:
            self._last = evaluation
        if self._last is None:
            raise self._failed(f"it ended without a value of {self._job.metric}")
        score = self._last.as_score(minimizes=self._minimizes)
        # Ray Tune ranks the score; the value is for people.
        return {EPOCH: self._last.epoch, self._job.metric: score, VALUE: self._last.value, "done": evaluation is None}

    def cleanup(self) -> None:
        """Stop the trial if it is still running."""
        if self._process is None or self._process.poll() is not None:
            return
        epoch = self._last.epoch if self._last else 0
        self._record(stopped_after=epoch)
        self._stop(f"{STOPPED_EARLY} after epoch {epoch}")

    def _evaluations(self) -> Iterator[Evaluation]:
        """Yield the evaluations in the journal, then new evaluations as they are written."""
        follower = Follower(self._folder, metric=self._job.metric)
        if self._suggestion.failure:
            raise self._failed(self._suggestion.failure)
        try:
            yield from follower.evaluations()
            if self._has_ended():
                return
            while True:
                started_at = time.time()
                process = self._process = self._start()
                while process.poll() is None:
                    yield from follower.evaluations()
                    time.sleep(_LOOK_S)
                yield from follower.evaluations()
                if not (self._job.shares_cluster and process.returncode == ResourceError.exit_code):
                    break
                self._await_others(since=started_at)
        except Unmeasurable as error:
            self._stop(str(error))
            raise self._failed(str(error)) from None
        self._check(process.returncode)

    def _await_others(self, *, since: float) -> None:
        """Wait before the trial is tried again, if other trials have had workers since a time: theirs will be free.

        Raises:
            TrialFailed: no other trial had workers. If room was missing, ``parallel.queue_timeout_s`` is over.
        """
        others = [each for each in trials_of(Path(self._job.folder)) if each != self._folder]
        while not any(found := [has_used_resources(each, since=since) for each in others]):
            if None not in found:
                lacked = _tail(self._folder / OUTPUT_NAME) or "the cluster lacks resources for the trial"
                self._record(lacked=lacked)
                raise TrialFailed(lacked)
            time.sleep(_AGAIN_S)
        time.sleep(_AGAIN_S)

    def _has_ended(self) -> bool:
        """Return True if nothing is left to train, after the process of an earlier session has ended."""
        path = self._folder / journal.FILE_NAME
        deadline = time.monotonic() + self._job.grace_s + AFTER_GRACE_S
        while path.is_file() and journal.is_open(path):
            if time.monotonic() > deadline:
                raise self._failed(f"it is still running in {journal.describe_writer(path)}")
            time.sleep(_LOOK_S)
        return state_of(self._folder)[0] in ("finished", "stopped early")

    def _start(self) -> "subprocess.Popen[bytes]":
        self._record()
        assignment = Assignment(job=self._job, record=self._suggestion, config_hash=self._hash)
        with (self._folder / OUTPUT_NAME).open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "pipeline.commands.sweep.trial_process"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                cwd=self._job.cwd,
                env=self._job.environment(),
                start_new_session=True,  # Ctrl-C is for the sweep, which then stops its trials one by one
            )
        _write(process.stdin, assignment.model_dump_json())
        return process

    def _stop(self, reason: str) -> None:
        process = self._process
        if process is None or process.poll() is not None:
            return
        _write(process.stdin, reason)
        try:
            process.wait(self._job.grace_s + AFTER_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _check(self, code: int) -> None:
        """Raise if the trial's process ended badly."""
        state, message = state_of(self._folder)
        if state == "interrupted" and code < 0:
            message = "its process was killed" + (" (out of memory?)" if code == -9 else f" by signal {-code}")
        if state in ("finished", "stopped early"):
            return
        raise self._failed(message or _tail(self._folder / OUTPUT_NAME) or f"its process ended with exit code {code}")

    def _failed(self, message: str) -> TrialFailed:
        """Return the failure, and record it for later sessions and the report."""
        self._record(failure=message)
        return TrialFailed(message)

    def _record(self, **outcome: Any) -> None:
        self._suggestion.model_copy(update=outcome).keep(self._folder)


def _write(pipe: IO[bytes] | None, line: str) -> None:
    assert pipe is not None  # it was asked for
    try:
        pipe.write(f"{line}\n".encode())
        pipe.flush()
    except BrokenPipeError:
        pass  # the process has ended, which is looked at next


def _tail(path: Path) -> str:
    """Return the last line of a file that isn't empty."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "").removeprefix("error: ")

"""Ray Tune trainable of a trial: starts the trial's process and reports the evaluations in its journal."""

import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray import tune

from pipeline.commands.study_trials.assignment import Record, TrialJob
from pipeline.commands.study_trials.journals import Evaluation, Follower, has_used_resources, state_of
from pipeline.errors import ResourceError
from pipeline.record import journal
from pipeline.record.folder import trials_of

EPOCH, TRIAL, VALUE = "epoch", "trial", "value"
OUTPUT_NAME = "output.txt"
"""Name of the file with the output of a trial's process, which is short unless it fails."""
_LOOK_S = 0.1
_INTERRUPTED = (-signal.SIGTERM, 128 + signal.SIGTERM)
_AGAIN_S = 10.0
"""Seconds until a trial that lacked resources is tried again: what it lacks may be something else than room."""


class TrialFailed(Exception):
    """Failure of a trial's process, with a message for the user."""


class Supervisor(tune.Trainable):  # type: ignore[misc]  # Ray has no types
    """Actor that starts a trial, reports its evaluations to Ray Tune, and stops it when Tune asks for it.

    A trial that ended in an earlier session is not trained again; the evaluations in its journal are reported.
    """

    def setup(self, config: dict[str, Any], job: TrialJob) -> None:
        """Take over the trial that Ray Tune has chosen: a `Record` as a mapping."""
        self._job = job
        self._record = Record.model_validate(config[TRIAL])
        self._folder = job.folder_of(self._record.number)
        self._process: subprocess.Popen[bytes] | None = None
        self._last: Evaluation | None = None
        self._evaluations = self._evaluate()

    def step(self) -> dict[str, Any]:
        """Return the next evaluation; after the end of the trial the last evaluation again, marked as done.

        Raises:
            TrialFailed: the trial failed.
        """
        evaluation = next(self._evaluations, None)
        self._last = evaluation or self._last
        if self._last is None:
            raise self._failed(f"it ended without a value of {self._job.metric}")
        score = self._last.as_score(minimizes=self._job.direction == "min")
        # Ray Tune ranks the score; the value is for people.
        return {EPOCH: self._last.epoch, self._job.metric: score, VALUE: self._last.value, "done": evaluation is None}

    def cleanup(self) -> None:
        """Stop the trial if Ray Tune doesn't let it continue; a resumed trial may not have started again."""
        is_left = self._process is None and state_of(self._folder)[0] == "interrupted"
        if self._last is not None and (is_left or self._is_running):
            self._keep(stopped_after=self._last.epoch)
            self._stop()

    def _evaluate(self) -> Iterator[Evaluation]:
        """Yield the evaluations in the journal, then new evaluations as they are written."""
        follower = Follower(self._folder, metric=self._job.metric)
        yield from follower.evaluations()
        if self._has_ended():
            return
        while True:
            started_at = time.time()
            process = self._process = self._start()
            while process.poll() is None and follower.has_validation:
                yield from follower.evaluations()
                time.sleep(_LOOK_S)
            yield from follower.evaluations()
            if not follower.has_validation:
                self._stop()
                raise self._failed(f"the data has no validation set, so {self._job.metric} can't be measured")
            if not (self._job.shares_cluster and process.returncode == ResourceError.exit_code):
                break
            self._await_others(since=started_at)
        self._check(process.returncode)

    def _await_others(self, *, since: float) -> None:
        """Wait before the trial is tried again, if other trials have had workers since a time: theirs will be free.

        Raises:
            TrialFailed: no other trial had workers. If room was missing, ``parallel.start_timeout_s`` is over.
        """
        others = [each for each in trials_of(self._job.folder) if each != self._folder]
        while not any(found := [has_used_resources(each, since=since) for each in others]):
            if None not in found:
                lacked = _tail(self._folder / OUTPUT_NAME) or "the cluster lacks resources for the trial"
                self._keep(lacked=lacked)
                raise TrialFailed(lacked)
            time.sleep(_AGAIN_S)
        time.sleep(_AGAIN_S)

    def _has_ended(self) -> bool:
        """Return True if nothing is left to train, after the process of an earlier session has ended."""
        path = self._folder / journal.FILE_NAME
        deadline = time.monotonic() + self._job.grace_s
        while path.is_file() and journal.is_open(path):
            if time.monotonic() > deadline:
                raise TrialFailed(f"it is still running in {journal.describe_writer(path)}")
            time.sleep(_LOOK_S)
        return state_of(self._folder)[0] in ("finished", "stopped early")

    def _start(self) -> "subprocess.Popen[bytes]":
        self._keep()
        with (self._folder / OUTPUT_NAME).open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "pipeline.commands.study_trials.trial_process"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                cwd=self._job.cwd,
                env=self._job.environment(),
                start_new_session=True,  # Ctrl-C is for the sweep, which then stops its trials one by one
            )
        assert process.stdin is not None  # it was asked for, and stays open: the process ends with this one
        with suppress(BrokenPipeError):  # the process has ended, which is looked at next
            pickle.dump((self._job, self._record), process.stdin)
            process.stdin.flush()
        return process

    @property
    def _is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _stop(self) -> None:
        if self._process is None or not self._is_running:
            return
        self._process.terminate()
        try:
            self._process.wait(self._job.grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _check(self, code: int) -> None:
        """Raise if the trial's process ended badly."""
        state, message = state_of(self._folder)
        if state in ("finished", "stopped early"):
            return
        if code < 0:
            message = f"its process was killed{' (out of memory?)' if code == -9 else f' by signal {-code}'}"
        if code in _INTERRUPTED or (state == "interrupted" and code < 0):
            raise TrialFailed(message)  # a resumed sweep continues it
        if state != "failed" and code > 0:  # the journal has the end of an earlier session, if any
            message = _tail(self._folder / OUTPUT_NAME) or f"its process ended with exit code {code}"
        raise self._failed(message)

    def _failed(self, message: str) -> TrialFailed:
        """Return the failure, and record it for later sessions and the report."""
        self._keep(failure=message)
        return TrialFailed(message)

    def _keep(self, **end: Any) -> None:
        self._record.model_copy(update=end).keep(self._folder)


def _tail(path: Path) -> str:
    """Return the last line of a file that isn't empty."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "").removeprefix("error: ")

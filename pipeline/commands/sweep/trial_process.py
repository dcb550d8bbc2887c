"""Process of a trial: ``pipeline run`` with the trial's values; it ends with the process that started it.

The first line of standard input is its assignment. A second line is the reason to stop early. The end of the input
means that the parent process is gone. The trial saves a checkpoint before it ends.
"""

import os
import signal
import sys
import threading
from pathlib import Path
from typing import NoReturn

from pipeline.commands.sweep.assignment import Assignment
from pipeline.errors import PipelineError, Terminated, UsageError, terminate
from pipeline.system import allocator
from pipeline.system.imports import importable, undisturbed
from pipeline.system.leftovers import Leftovers, exit_despite_threads


class _Lifeline:
    """Standard input, which carries the assignment and stop requests."""

    def __init__(self) -> None:
        self.reason = ""
        """Reason to stop early; empty without a request."""
        # Unbuffered: a thread that waits in sys.stdin would hold a lock that Python needs to end.
        self._stdin = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115 - open as long as the process

    def assignment(self) -> Assignment:
        """Read the assignment."""
        return Assignment.model_validate_json(self._stdin.readline())

    def watch(self) -> None:
        """Start a thread that stops this process at a stop request or at the end of the input."""
        threading.Thread(target=self._wait, name="lifeline", daemon=True).start()

    def _wait(self) -> None:
        self.reason = self._stdin.readline().decode().strip()
        os.kill(os.getpid(), signal.SIGTERM)


def main() -> NoReturn:
    """Run the trial; exit with the code of ``pipeline run``."""
    leftovers = Leftovers()
    code = _run()
    leftovers.end(_warn)
    exit_despite_threads(code)
    sys.exit(code)


def _warn(message: str) -> None:
    sys.stderr.write(f"warning: {message}\n")


def _run() -> int:
    """Run the trial; return the exit code."""
    signal.signal(signal.SIGTERM, terminate)
    lifeline = _Lifeline()
    assignment = lifeline.assignment()
    lifeline.watch()
    try:
        with importable(Path.cwd()), allocator.huge_pages():
            train(assignment, lifeline)
    except PipelineError as error:
        sys.stderr.write(f"{error.told}\n")
        return error.exit_code
    except Terminated:
        return 143
    return 0


def train(assignment: Assignment, lifeline: _Lifeline) -> None:
    """Run the trial, resumed if it was started before."""
    with undisturbed():
        from pipeline.commands import run
    from pipeline.commands.sweep.journals import has_begun
    from pipeline.config.load import load
    from pipeline.config.summary import config_hash
    from pipeline.recording.recorded_run import Membership
    from pipeline.recording.terminal import Terminal

    job, record = assignment.job, assignment.record
    file = load(job.file, job.overrides).varied({**job.common, **record.values})
    if config_hash(file.experiment) != assignment.config_hash:
        raise UsageError(
            f"{job.file}, or a default of pipeline, has changed since the sweep started. Restore the file, or the "
            "version of pipeline that started the sweep, or start a new sweep."
        )
    folder = job.folder_of(record.number)
    member = Membership(
        folder=folder,
        title=record.title,
        interruption=lambda: lifeline.reason,
        logs_model=job.logs_models,
        shares_cluster=job.shares_cluster,
    )
    run.run(
        file,
        with_baseline=False,
        verbose=job.verbose,
        terminal=Terminal.of(quiet=True),
        resume=str(folder) if has_begun(folder) else None,
        member=member,
    )


if __name__ == "__main__":
    main()

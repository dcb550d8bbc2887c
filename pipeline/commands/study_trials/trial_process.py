"""Process of a trial: ``pipeline run`` with the trial's values; it ends with the process that started it.

Standard input has the pickled `TrialJob` and `Record`. Its end means that the parent process is gone. The trial saves a
checkpoint before it ends.
"""

import os
import pickle
import signal
import sys
import threading
from pathlib import Path
from typing import NoReturn

from pipeline.commands.study_trials.assignment import Record, TrialJob
from pipeline.commands.study_trials.journals import describe_early_stop, has_begun
from pipeline.errors import PipelineError, Terminated, terminate
from pipeline.system import memory
from pipeline.system.imports import importable, undisturbed
from pipeline.system.leftovers import Leftovers, exit_despite_threads


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
    job, record = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the process that started this one
    threading.Thread(target=_end_with_parent, name="lifeline", daemon=True).start()
    try:
        with importable(Path.cwd()), memory.huge_pages():
            train(job, record)
    except PipelineError as error:
        sys.stderr.write(f"{error.told}\n")
        return error.exit_code
    except Terminated:
        return 143
    return 0


def _end_with_parent() -> None:
    os.read(0, 1)  # not sys.stdin, whose lock Python needs to end
    os.kill(os.getpid(), signal.SIGTERM)


def train(job: TrialJob, record: Record) -> None:
    """Run the trial, resumed if it was started before."""
    with undisturbed():
        from pipeline.commands import run
    from pipeline.drive.recorded_run import Membership
    from pipeline.record.screen import Terminal

    folder = job.folder_of(record.number)
    member = Membership(
        folder=folder,
        title=record.title,
        interruption=lambda: describe_early_stop(folder),
        logs_model=job.logs_models,
        shares_cluster=job.shares_cluster,
    )
    run.run(
        job.file_of(record),
        with_baseline=False,
        verbose=job.verbose,
        terminal=Terminal.of(quiet=True),
        resume=str(folder) if has_begun(folder) else None,
        member=member,
    )


if __name__ == "__main__":
    main()

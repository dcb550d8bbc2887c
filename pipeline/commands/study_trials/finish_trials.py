"""End of a sweep's trials: their processes are stopped, and results that they didn't send are delivered.

On a busy machine a trial gives up sending after a minute; one that is stopped early may be killed while it sends.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from pipeline.commands.study_trials.journals import has_begun
from pipeline.errors import PipelineError
from pipeline.record import journal
from pipeline.record.folder import trials_of
from pipeline.system import stages
from pipeline.tracking.follow import sync
from pipeline.tracking.outcome import TrackingOutcome
from pipeline.wording import counted

_LOOK_S = 0.1
_MODULE = "pipeline.commands.study_trials.trial_process"


def stop(*, grace_s: float, tell: Callable[[str], None]) -> None:
    """Ask all trials to save and end; kill them after ``grace_s``, or at Ctrl-C.

    Args:
        grace_s: seconds that trials have to save and end.
        tell: gets progress messages.
    """
    trials = [each for each in psutil.Process().children(recursive=True) if _is_trial(each)]
    if trials:
        tell(f"stopping {counted(len(trials), 'training')} after a checkpoint. To kill them, press Ctrl-C again.")
    deadline = time.monotonic() + grace_s
    try:
        for trial in trials:
            with suppress(psutil.Error):
                trial.terminate()
        while any(map(_is_trial, trials)) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
    finally:
        for trial in filter(_is_trial, trials):
            _kill(trial)


def _kill(trial: psutil.Process) -> None:
    with suppress(psutil.Error):
        family = [*trial.children(recursive=True), trial]
        for process in family:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(family, timeout=5)


def _is_trial(process: psutil.Process) -> bool:
    """Return True for the process of a trial that hasn't ended."""
    try:
        return _MODULE in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def send(sweep: Path, *, patience_s: float, tell: Callable[[str], None], warn: Callable[[str], None]) -> None:
    """Send the missing results, trial by trial, until the store refuses some.

    Args:
        sweep: the sweep's folder.
        patience_s: seconds to wait for trials that write a checkpoint or send their results.
        tell: gets progress messages.
        warn: gets warnings.
    """
    stages.begin("waiting until the trainings have ended")
    deadline = time.monotonic() + patience_s
    while any(map(_is_open, trials_of(sweep))) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    stages.end()
    waiting = [folder for folder in find_undelivered(sweep) if not _is_open(folder)]
    if waiting:
        tell(f"sending the results of {_format_names(waiting)} that MLflow lacks")
    for folder in waiting:
        try:
            if not sync(folder, warn=warn).delivered:
                return
        except PipelineError as error:  # e.g. a damaged journal; other trials can still be sent
            warn(str(error))


def find_undelivered(sweep: Path) -> list[Path]:
    """Return the folders of the trials whose results the tracking store lacks."""
    outcomes = {folder: TrackingOutcome.kept(folder) for folder in trials_of(sweep) if has_begun(folder)}
    return [folder for folder, outcome in outcomes.items() if outcome is None or not outcome.delivered]


def missing(sweep: Path) -> str:
    """Return a sentence on trials whose results the tracking store lacks; empty if it has all."""
    folders = find_undelivered(sweep)
    if not folders:
        return ""
    return f"results of {_format_names(folders)} are missing in MLflow. Send them with: pipeline sync {sweep}"


def _is_open(folder: Path) -> bool:
    return journal.is_open(folder / journal.FILE_NAME)


def _format_names(folders: list[Path]) -> str:
    return f"{counted(len(folders), 'training')} ({', '.join(folder.name for folder in folders)})"

"""End of a sweep's trials: their processes are stopped, and results that they didn't send are delivered.

On a busy machine a trial gives up sending after a minute; one that is stopped early may be killed while it sends.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from pipeline.commands.sweep.assignment import AFTER_GRACE_S, Record
from pipeline.commands.sweep.journals import has_begun
from pipeline.errors import PipelineError
from pipeline.recording import journal
from pipeline.recording.folder import trials_of
from pipeline.recording.outcome import TrackingOutcome
from pipeline.recording.sync import sync
from pipeline.wording import counted

_LOOK_S = 0.1
MODULE = "pipeline.commands.sweep.trial_process"


def running() -> list[psutil.Process]:
    """Return the trials' processes that haven't ended, found among the descendants of this one."""
    return [each for each in psutil.Process().children(recursive=True) if _is_member(each)]


def stop(*, grace_s: float, tell: Callable[[str], None]) -> None:
    """Ask all trials to save and end; kill them after ``grace_s``, or at Ctrl-C.

    Args:
        grace_s: seconds that trials have to save.
        tell: gets progress messages.
    """
    asked: set[int] = set()
    deadline = time.monotonic() + grace_s + AFTER_GRACE_S
    try:
        while there := running():
            new = [member for member in there if member.pid not in asked]
            if new:
                tell(f"stopping {counted(len(new), 'trial')} after a checkpoint. To kill them, press Ctrl-C again.")
            for member in new:
                with suppress(psutil.Error):
                    member.terminate()
                asked.add(member.pid)
            if time.monotonic() > deadline:
                break
            time.sleep(_LOOK_S)
    finally:
        for member in running():
            _kill(member)


def _kill(member: psutil.Process) -> None:
    with suppress(psutil.Error):
        family = [*member.children(recursive=True), member]
        for process in family:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(family, timeout=AFTER_GRACE_S)


def _is_member(process: psutil.Process) -> bool:
    try:
        return MODULE in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def send(sweep: Path, *, patience_s: float, tell: Callable[[str], None], warn: Callable[[str], None]) -> None:
    """Send the missing results, trial by trial, until the store refuses some.

    Args:
        sweep: the sweep's folder.
        patience_s: seconds to wait for trials that are ending.
        tell: gets progress messages.
        warn: gets warnings.
    """
    _wait(sweep, patience_s=patience_s, tell=tell)
    waiting = [folder for folder in undelivered(sweep) if not journal.is_open(folder / journal.FILE_NAME)]
    if waiting:
        tell(f"sending the results of {_named(waiting)} to MLflow, because the processes of the trials couldn't")
    for folder in waiting:
        try:
            if not sync(folder, warn=warn).delivered:
                return
        except PipelineError as error:  # e.g. a damaged journal; other trials can still be sent
            warn(str(error))


def undelivered(sweep: Path) -> Iterator[Path]:
    """Yield the folders of the trials whose results the tracking store lacks."""
    for folder in trials_of(sweep):
        known = TrackingOutcome.kept(folder)
        if has_begun(folder) and not (known and known.delivered):
            yield folder


def missing(sweep: Path) -> str:
    """Return a sentence on trials whose results the tracking store lacks; empty if it has all."""
    folders = list(undelivered(sweep))
    if not folders:
        return ""
    return f"results of {_named(folders)} are missing in MLflow. Send them with: pipeline sync {sweep}"


def _wait(sweep: Path, *, patience_s: float, tell: Callable[[str], None]) -> None:
    """Wait for the processes of trials that were stopped: they write a checkpoint and send their results."""
    deadline, told = time.monotonic() + patience_s, False
    while running := [folder for folder in trials_of(sweep) if journal.is_open(folder / journal.FILE_NAME)]:
        if not told:
            tell(f"waiting until {_named(running)} has ended")
            told = True
        if time.monotonic() > deadline:
            return
        time.sleep(_LOOK_S)


def _named(folders: list[Path]) -> str:
    numbers = [str(record.number) for folder in folders if (record := Record.read(folder)) is not None]
    return f"trial {numbers[0]}" if len(numbers) == 1 else f"{counted(len(numbers), 'trial')} ({', '.join(numbers)})"

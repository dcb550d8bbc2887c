"""Processes of running trials, found among the descendants of the sweep's process."""

import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from pipeline.wording import counted

MODULE = "pipeline.commands.sweep.trial_process"
_AFTER_GRACE_S = 15.0
_LOOK_S = 0.1


def running() -> list[psutil.Process]:
    """Return the trials' processes that haven't ended."""
    return [each for each in psutil.Process().children(recursive=True) if _is_member(each)]


def stop(*, grace_s: float, tell: Callable[[str], None]) -> None:
    """Ask all trials to save and end; kill them after ``grace_s``, or at Ctrl-C.

    Args:
        grace_s: seconds that trials have to save.
        tell: gets progress messages.
    """
    asked: set[int] = set()
    deadline = time.monotonic() + grace_s + _AFTER_GRACE_S
    try:
        while there := running():
            new = [member for member in there if member.pid not in asked]
            if new:
                tell(f"stopping {counted(len(new), 'trial')}, with a checkpoint; Ctrl-C again kills them")
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
        psutil.wait_procs(family, timeout=_AFTER_GRACE_S)


def _is_member(process: psutil.Process) -> bool:
    try:
        return MODULE in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False

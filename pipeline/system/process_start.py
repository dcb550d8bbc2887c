"""Start of a process, which together with its number identifies it."""

import psutil


def seconds_after_boot(process: psutil.Process) -> float:
    """Return when a process was started; unlike `psutil.Process.create_time` it stays when the clock is set."""
    booted = psutil.boot_time()  # older versions of psutil keep it for the next line
    return round(psutil.Process(process.pid).create_time() - booted, 2)

"""Processor time that a machine spends on anything but given processes."""

import time

import psutil


class OtherLoad:
    """Processor time since this object was made: that of the machine, and this process's part of it.

    The parts are given apart, as several processes of a machine may belong together.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._own, self._busy = _own_s(), _busy_s()

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self._began

    @property
    def own_s(self) -> float:
        """Processor time of this process and its children, in seconds."""
        return _own_s() - self._own

    @property
    def busy_s(self) -> float:
        """Processor time of the whole machine, in seconds."""
        return _busy_s() - self._busy


def _own_s() -> float:
    total = 0.0
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system  # of those that have ended
    return total


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))

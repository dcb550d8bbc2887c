"""Clock of a worker's node, compared with the driver's clock: all times of a run are times of the driver."""

import math
import socket
import time

from pipeline.protocol.events import AnyEvent, Heartbeat, Warned

_SKEW_S = 1.0
"""Difference from which times are corrected; a smaller one hides in the delays of messages."""
_CERTAIN = 5
"""Heartbeats that must agree before a warning: at the start, or when the driver was paused, many arrive late."""
_LATE_S = 0.1
"""Difference from which heartbeats don't agree. Less than the time between two that wait and arrive together."""


class WorkerClock:
    """Clock of one worker, compared by the arrival of its heartbeats, which are sent as soon as they are made.

    The smallest difference between a heartbeat's arrival and its time is the difference of the clocks. An event that
    waits in the worker or on the way keeps the time at which it happened.
    """

    def __init__(self) -> None:
        self._behind_s = math.inf
        self._last = -math.inf
        self._driver_began = math.inf
        self._agreeing = 0

    def compare(self, heartbeat: Heartbeat) -> Warned | None:
        """Note the arrival of a heartbeat; return the warning that the clocks differ, once for each difference."""
        arrived = time.time()
        driver_began = arrived - time.monotonic()
        # One of the clocks was set: the worker's back, or the driver's.
        if heartbeat.time < self._last or abs(driver_began - self._driver_began) >= _SKEW_S:
            self._behind_s = math.inf
        self._last, self._driver_began = heartbeat.time, driver_began
        behind_s = arrived - heartbeat.time
        if behind_s < self._behind_s - _LATE_S:  # the heartbeats so far were late, or a clock was set
            self._agreeing = 0
        self._agreeing += 1
        self._behind_s = min(self._behind_s, behind_s)
        return self._warning(heartbeat.rank.node) if self._agreeing == _CERTAIN and self._is_skewed else None

    def correct(self, event: AnyEvent) -> AnyEvent:
        """Return an event of the worker with its time on the driver's clock."""
        return event.model_copy(update={"time": event.time + self._behind_s}) if self._is_skewed else event

    @property
    def _is_skewed(self) -> bool:
        return _SKEW_S <= abs(self._behind_s) < math.inf

    def _warning(self, node: str) -> Warned:
        direction = "behind" if self._behind_s > 0 else "ahead of"
        return Warned(
            message=f"The clock of {node} is {abs(self._behind_s):.1f} s {direction} the clock of the driver on "
            f"{socket.gethostname()}. The times in this run are corrected. Synchronize all nodes by NTP, for example: "
            "timedatectl set-ntp true; chronyc makestep",
            subject="clocks",
        )

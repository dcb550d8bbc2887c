"""Requests for nodes to a cluster's autoscaler, which starts nodes for placement groups that have no room."""

import threading
import time
from contextlib import suppress

from ray.exceptions import RayError
from ray.util import placement_group, remove_placement_group
from ray.util.placement_group import PlacementGroup

from pipeline.launch.cluster.placement import per_worker
from pipeline.protocol.trial import Trial

_REPEAT_S = 30.0
"""Shortest time between two requests: room that was found may be on nodes that can't have workers."""


class NodeRequest:
    """A placement group of the size of a trial's workers, until it has room. Safe to use from several threads.

    Unlike `ray.autoscaler.sdk.request_resources`, it counts what other jobs occupy, two runs don't replace each
    other's requests, and Ray withdraws it when the driver ends, however that happens.
    """

    def __init__(self) -> None:
        self._group: PlacementGroup | None = None
        self._size: tuple[str, int] | None = None
        """Trial and workers of the latest request, unless it was withdrawn."""
        self._made_at = 0.0
        self._lock = threading.RLock()

    def make(self, trial: Trial, *, workers: int) -> bool:
        """Ask for room for a number of a trial's workers, instead of what was asked for before.

        Returns True if it is a new request; the same one is made again if there is room for it, but not for the trial.
        """
        size = (trial.name, workers)
        with self._lock:
            self.free_if_met()
            is_new = size != self._size
            if is_new or (self._group is None and time.monotonic() - self._made_at > _REPEAT_S):
                self.withdraw()
                self._size, self._made_at = size, time.monotonic()
                strategy = trial.experiment.parallel.placement.upper()
                self._group = placement_group([per_worker(trial)] * workers, strategy=strategy)
            return is_new

    def free_if_met(self) -> None:
        """Free the room that was asked for once it is there, so that it counts as free."""
        with self._lock:
            if self._group is not None and self._group.wait(0):
                self._remove()

    def withdraw(self) -> None:
        """Withdraw the request, if there is one."""
        with self._lock:
            self._remove()
            self._size = None

    def _remove(self) -> None:
        with suppress(RayError):  # the cluster is gone, and the request with it
            if self._group is not None:
                remove_placement_group(self._group)
        self._group = None

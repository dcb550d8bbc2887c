"""The nodes of an existing cluster that can have workers: each one is checked once, others are left out."""

import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pipeline.errors import ResourceError
from pipeline.experiment.schema import Parallel
from pipeline.launch.cluster.checks import NodeChecks
from pipeline.launch.cluster.code import Code
from pipeline.launch.cluster.placement import find_able_nodes, total_capacity, usable_nodes
from pipeline.plan.resources import UnfitNode, format_unfit
from pipeline.protocol.trial import Trial

_NODE_ID = "ray.io/node-id"
"""Label that Ray gives each node."""


class Check(NamedTuple):
    """Trial for which nodes are checked, its checkpoints' address, and the receiver of warnings."""

    trial: Trial
    checkpoints: str | None
    warn: Callable[[str], None]


class FitNodes:
    """Nodes that have passed the checks. Needs a connection; safe to use from several threads."""

    def __init__(self, parallel: Parallel, *, code: Code, unfit: Mapping[str, UnfitNode]) -> None:
        """Leave out the nodes ``unfit``, by Ray's id, that were found when the run was planned."""
        self._parallel = parallel
        self._code = code
        self._unfit = dict(unfit)
        self._fit: set[str] = set()
        self._running: NodeChecks | None = None
        self._is_first = True
        """True until nodes are checked; the versions of the first ones were compared when the run was planned."""
        self._unchecked = ""
        """Reason for which new nodes could not be checked, as the user has read it."""
        self._lock = threading.RLock()

    def check(self, check: Check, *, needs_room: bool = True) -> None:
        """Check all nodes that are new, and wait for the answers.

        Args:
            check: the trial.
            needs_room: False if nodes can be added, so that there may be too few now.

        Raises:
            ResourceError: a node has to be left out, and the others are too few.
        """
        with self._lock:
            is_first = self._is_first
            for note in format_unfit(self._unfit.values()) if is_first else ():
                check.warn(_describe_unfit(note))
            self._finish(check)
            self._start(check)
            self._finish(check)
            self._is_first = False  # also if there was no node yet
            trial = check.trial
            least = trial.experiment.parallel.least_workers if trial.is_elastic else trial.workers
            has_room = not (is_first and needs_room) or total_capacity(trial, self.records()) >= least
            unfit = self._find_excluded() & self._unfit.keys()
            if unfit and not has_room:
                found = format_unfit(self._unfit[node] for node in unfit)
                raise ResourceError("\n".join(["nodes of the cluster can't run workers:", *found]))

    def poll(self, check: Check) -> list[dict[str, Any]]:
        """Return Ray's records of the nodes that can have workers now; start to check new ones, without waiting."""
        with self._lock:
            try:
                self._start(check)
            except ResourceError as error:  # this machine lacks storage or a free port: nodes that passed still count
                if str(error) != self._unchecked:
                    self._unchecked = str(error)
                    check.warn(f"new nodes of the cluster get no workers, because they can't be checked: {error}")
            if self._running is not None and self._running.are_done():
                self._finish(check)
            return self.records()

    def close(self) -> None:
        """End a check that has no results yet: it listens at a port and has a file among the checkpoints."""
        with self._lock:
            if self._running is not None:
                self._running.close()
                self._running = None

    def records(self) -> list[dict[str, Any]]:
        """Return Ray's records of the usable nodes that have passed."""
        return [node for node in usable_nodes() if node["NodeID"] in self._fit]

    def selector(self) -> dict[str, str]:
        """Return the labels by which Ray places workers on these nodes only; empty if no other has room for one."""
        excluded = self._find_excluded()
        return {_NODE_ID: f"!in({','.join(sorted(excluded))})"} if excluded else {}

    def _find_excluded(self) -> set[str]:
        """Return nodes that have room for a worker, but didn't pass, or weren't checked yet."""
        return find_able_nodes(self._parallel).keys() - self._fit

    def _start(self, check: Check) -> None:
        able = find_able_nodes(self._parallel)
        new = {id_: node for id_, node in able.items() if id_ not in self._fit and id_ not in self._unfit}
        if not new or self._running is not None:
            return
        self._running = NodeChecks(
            check.trial.experiment,
            nodes=new,
            code=self._code,
            checkpoints=check.checkpoints,
            with_versions=not self._is_first,
        )

    def _finish(self, check: Check) -> None:
        if self._running is None:
            return
        found = self._running.results()
        self._unfit |= found.unfit
        self._fit |= self._running.nodes.keys() - found.unfit.keys()
        self._running = None
        for note in (*map(_describe_unfit, format_unfit(found.unfit.values())), *found.warnings):
            check.warn(note)


def _describe_unfit(note: str) -> str:
    return f"no workers are placed on {note}"

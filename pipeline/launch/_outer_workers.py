"""Workers of a trial on the ranks that an outer launcher has started, as the driver knows them.

The driver's own process, rank 0, starts rank 0's worker. The processes of the other ranks start theirs, which connect
to the driver as every worker does, so that their failures, hangs, metrics and ends are known.
"""

import time
from collections.abc import Mapping
from dataclasses import replace

from pipeline.launch._outer_group import OuterGroup
from pipeline.launch._outer_ranks import facts_of_all, find_gpus
from pipeline.launch.base import Attempt
from pipeline.protocol.channel.wire import Address
from pipeline.protocol.trial import Trial
from pipeline.protocol.trial_outcome import Outcome
from pipeline.worker.interfaces import LOOPBACK, address_facing, interface_variables, is_loopback

_LAST_REPORTS_S = 10.0
"""Seconds in which it becomes known which rank was lost, after others have failed because of that."""


class OtherWorker:
    """The worker of another rank, known by its connection."""

    def __init__(self, rank: int, *, attempt: Attempt, deadline: float) -> None:
        self._rank, self._attempt, self._deadline = rank, attempt, deadline

    def poll(self) -> int | None:
        """Return 0 once it has ended or is lost, 1 once it has failed or is late; None while it runs."""
        there = self._attempt
        if self._rank in {failure.rank.rank for failure in self._attempt.outcome().failures}:
            return 1
        if self._rank in there.ended | there.lost:
            return 0
        return 1 if self._rank not in there.nodes and time.monotonic() > self._deadline else None


class OuterWorkers:
    """The workers of one launch of a trial on all ranks of an outer launcher."""

    def __init__(self, trial: Trial, *, group: OuterGroup, attempt: Attempt) -> None:
        self._trial, self._group, self._attempt = trial, group, attempt
        self._timeout_s = trial.experiment.parallel.start_timeout_s
        self._facts = facts_of_all(group.outer, timeout_s=self._timeout_s)
        self.host = self._find_address()
        """Address of this machine that all ranks reach."""
        self.is_stop_asked = group.is_stop_asked
        """Returns True once another rank has asked for a stop."""

    def start_others(self, channel: Address) -> None:
        """Have the other ranks start their workers, which connect to the channel."""
        trial, gpus = self._trial, find_gpus(self._facts, each=max(1, self._trial.devices_per_worker))
        command = self._group.assign(trial, channel, gpus=gpus)
        network = interface_variables(self.host) if self.host != LOOPBACK else {}
        self.variables = self._group.variables(command, cpus=trial.cpus_per_worker) | network
        """Environment variables of rank 0's worker."""
        deadline = time.monotonic() + self._timeout_s
        self.others = [OtherWorker(rank, attempt=self._attempt, deadline=deadline) for rank in range(1, trial.workers)]

    def find_lost(self, losses: Mapping[int, str]) -> dict[int, str]:
        """Return the ranks that the others have failed for, with the reason; they may become known a while later."""
        failures = self._attempt.outcome().failures
        is_known = losses.keys() - {failure.rank.rank for failure in failures}
        if is_known or any(failure.origin == "rank" for failure in failures):
            return {}
        others = range(1, self._trial.workers)
        return dict.fromkeys(self._attempt.await_ends(others, timeout_s=_LAST_REPORTS_S), "")

    def outcome(self, losses: Mapping[int, str]) -> Outcome:
        """Return the outcome of the launch; ``losses`` says how workers were lost, by rank."""
        attempt = self._attempt
        late = f"it did not start within parallel.start_timeout_s ({self._timeout_s:g} s)"
        died = "its process was killed or crashed, or its node is unreachable"
        others = {rank: died if rank in attempt.nodes else late for rank in losses if rank > 0}
        silent = {rank: how for rank, how in attempt.silent.items() if rank in losses}
        nodes = {facts.rank: facts.resources.node for facts in self._facts}
        return replace(attempt.outcome({**losses, **others, **silent}), nodes=nodes)

    def _find_address(self) -> str:
        if not self._group.outer.has_several_nodes:
            return LOOPBACK
        far = (each.address for each in self._facts[1:] if not is_loopback(each.address))
        return address_facing(next(far, self._group.outer.host))

"""Launch of a trial on the ranks that an outer launcher has started: rank 0 works in the driver's process.

The other ranks connect to the driver as every worker does, so that their failures, hangs, metrics and ends are known.
The outer launcher may end all ranks with SIGTERM once one of them has died: the death counts then, not the signal.
"""

import time
from contextlib import AbstractContextManager, nullcontext, suppress

from pipeline.errors import Terminated
from pipeline.launchers._outer_group import Command, OuterGroup
from pipeline.launchers._outer_ranks import facts_of_all, find_gpus
from pipeline.launchers._shutdown import StopRequest
from pipeline.launchers.base import Attempt
from pipeline.protocol.trial import Rank, Trial
from pipeline.protocol.trial_outcome import Outcome
from pipeline.system.process import environment
from pipeline.system.signals import SAME_S
from pipeline.worker import main as worker
from pipeline.worker.interfaces import (
    LOOPBACK,
    address_facing,
    connections_ended_by_failure,
    interface_variables,
    is_loopback,
)
from pipeline.worker.process_group import abort_on_failure

_LAST_REPORTS_S = 10.0
"""Seconds after rank 0's end in which the other ranks notice that it, or another one, has failed."""
_DEATH_S = 0.5
"""Seconds after SIGTERM in which the death of another rank becomes known that the signal is due to."""


def launch_on_all(trial: Trial, *, group: OuterGroup, attempt: Attempt, stop: StopRequest) -> Outcome:
    """Run a trial to its end: on all ranks if it has several workers, else on rank 0 alone.

    Raises:
        Terminated: SIGTERM, while no other rank has failed.
    """
    if trial.workers == 1:
        with suppress(worker.WorkerFailed):  # it has been reported
            worker.run(trial, rank=Rank(node=group.rank.node), outbox=attempt.outbox)
        return attempt.outcome()
    group.is_failing, group.is_stopping = False, lambda: stop.asked
    stop.is_moot = lambda: attempt.attendance.trouble_at is not None
    host = _own_address(trial, group=group)
    own = interface_variables(host, wanted=trial.experiment.parallel.network_interface) if host != LOOPBACK else {}
    facts = facts_of_all(group.outer, timeout_s=trial.experiment.parallel.start_timeout_s)
    gpus = find_gpus(facts, each=max(1, trial.devices_per_worker))
    with environment(**own), attempt.listening(host) as address:
        losses = _run(trial, group=group, attempt=attempt, command=group.assign(trial, address, gpus=gpus))
    outcome = attempt.outcome(losses | {rank: how for rank, how in attempt.silent.items() if rank in losses})
    trouble_at = attempt.attendance.trouble_at
    if stop.asked and trouble_at is not None and trouble_at < stop.asked_at + SAME_S:
        stop.withdraw()
    group.lost |= losses.keys()
    group.is_failing = outcome.has_failed
    return outcome


def _run(trial: Trial, *, group: OuterGroup, attempt: Attempt, command: Command) -> dict[int, str]:
    """Work on the trial as rank 0; return how other ranks were lost, by rank."""
    attendance, others, has_failed = attempt.attendance, range(1, trial.workers), False
    timeout_s = trial.experiment.parallel.start_timeout_s
    late = f"it did not start within parallel.start_timeout_s ({timeout_s:g} s)"
    try:
        if missing := attendance.await_arrival(others, timeout_s=timeout_s):
            return dict.fromkeys(missing, late)
        group.retract(command)
        if not attendance.lost:
            store = group.store(command)
            with connections_ended_by_failure(), _peers_freed(trial, group=group, attempt=attempt, command=command):
                worker.run(trial, rank=group.rank_in(command), outbox=attempt.outbox, store=store)
    except worker.WorkerFailed:  # it has been reported
        has_failed = True
    except Terminated:
        time.sleep(_DEATH_S)
        if not attendance.lost:
            raise
    unreachable = attendance.await_ends(others, timeout_s=_LAST_REPORTS_S) if has_failed else set()
    if any(failure.origin == "rank" for failure in attempt.outcome().failures):
        unreachable = set()  # they will notice later
    died = "its process was killed or crashed, or its node is unreachable"
    losses = dict.fromkeys(attendance.lost | unreachable, died)
    if attempt.outcome().started is None:  # else the outcome names the nodes
        facts = facts_of_all(group.outer, timeout_s=timeout_s)
        return {rank: f"on {facts[rank].resources.node}: {how}" for rank, how in losses.items()}
    return losses


def _peers_freed(
    trial: Trial, *, group: OuterGroup, attempt: Attempt, command: Command
) -> AbstractContextManager[None]:
    """Return a context in which ranks whose GPUs wait for a failed rank are freed; gloo's notice it themselves."""

    def has_failed() -> bool:
        if not (attempt.attendance.lost or attempt.outcome().has_failed):
            return False
        group.note_failure(command)
        return True

    return abort_on_failure(has_failed, end=None) if trial.device == "cuda" else nullcontext()


def _own_address(trial: Trial, *, group: OuterGroup) -> str:
    """Return the address at which this process listens: one that ranks on other machines reach."""
    if not group.outer.has_several_nodes:
        return LOOPBACK
    facts = facts_of_all(group.outer, timeout_s=trial.experiment.parallel.start_timeout_s)
    far = (each.address for each in facts[1:] if not is_loopback(each.address))
    return address_facing(next(far, group.outer.host))

"""Under ``torchrun`` or ``srun`` each process is a rank, and rank 0's records, too: it trains in a thread of its own.

The processes meet in torch's key-value store. Rank 0 learns there what each of them has, the others what to train and
at last how the run ended. A rank that dies ends the job; its launcher, or a requeue, starts all of them again.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import ResourceError, Terminated, TrainingError, UsageError
from pipeline.experiment.schema import Experiment, Parallel
from pipeline.experiment.values import Frozen
from pipeline.launch.base import LOOPBACK, Attempt, StopRequest
from pipeline.launch.node_facts import (
    RankFacts,
    address_facing,
    combine_facts,
    find_facts,
    find_gpus,
    find_own_address,
    interface_variables,
    is_loopback,
    refuse_others,
)
from pipeline.plan.outer_launcher import OuterLauncher, outer_launcher
from pipeline.plan.plan import Plan
from pipeline.plan.resources import Resources
from pipeline.protocol.channel import Address, ChannelOutbox, DirectOutbox
from pipeline.protocol.events import Outcome
from pipeline.protocol.trial import Rank, Trial, trial_from_json
from pipeline.system import SAME_S, abandon, end_after, on_sigterm, undisturbed
from pipeline.wording import listed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_LAUNCHER = "torchrun"  # Value of ``parallel.launcher`` for ranks that an outer launcher has started
_POLL_S, _COMMAND_POLL_S = 0.1, 0.5
_FAREWELL_S = 5.0  # Seconds in which all ranks learn how the run ended
_LOSS_S, _LAST_REPORTS_S = 3.0, 10.0
"""Seconds in which other ranks end after one has failed, and in which it becomes known which one they failed for."""
_KNOWN_S = 0.5  # Seconds in which a lost rank is noticed after its launcher has sent SIGTERM because of it
_DIED = "its process was killed or crashed, or its node is unreachable"


class Command(Frozen):
    """Message of rank 0 to the other ranks: a trial to work on, or the end of the run."""

    trial: str = ""  # JSON of the trial; empty at the end of the run
    channel: str = ""  # Address of the trial's inbox
    gpus: tuple[int | None, ...] = ()  # `Rank.gpu` of each rank
    exit_code: int = 0


class Group:
    """This process's part in the group of ranks."""

    def __init__(self, outer: OuterLauncher, *, timeout_s: float) -> None:
        self.outer, self.node = outer, socket.gethostname()
        self.number = 0  # Number of the next command
        self._timeout_s, self._host, self._server = timeout_s, outer.host, None
        if outer.is_driver and not outer.has_store:
            from pipeline.worker import open_store

            self._host = find_own_address(outer)
            try:
                self._server = open_store(self._host, outer.port, timeout=timedelta(seconds=timeout_s))
            except OSError as error:
                raise ResourceError(
                    f"rank 0 can't listen at {self._host}:{outer.port}: {error.strerror or error}. For all ranks, set "
                    f"MASTER_ADDR to an address of {self.node}, where rank 0 runs, and MASTER_PORT to a free port."
                ) from error
        self._store = self.connected(f"pipeline/{outer.attempt}")

    def connected(self, name: str) -> "Store":
        """Return a connection to the store of its own, with names of its own."""
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        deadline, port = time.monotonic() + self._timeout_s, self.outer.port
        while True:  # torch's own wait reacts to no signal
            try:
                socket.create_connection((self._host, port), timeout=0.5).close()
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise ResourceError(
                        f"{self.node}: rank 0 doesn't answer at {self._host}:{port} within parallel.start_timeout_s "
                        f"({self._timeout_s:g} s): {error.strerror or error}. "
                        "Set MASTER_ADDR to an address of rank 0's machine that all machines reach."
                    ) from error
                time.sleep(_POLL_S)
        timeout = timedelta(seconds=self._timeout_s)
        store = TCPStore(self._host, port, is_master=False, timeout=timeout, wait_for_workers=False)
        return PrefixStore(name, store)

    def publish(self) -> None:
        """Send rank 0 the facts about this rank."""
        self._store.set(f"facts/{self.outer.rank}", find_facts(self.outer).model_dump_json())

    def gather(self) -> list[RankFacts]:
        """Wait for the facts of all ranks, and return them in the order of ranks. For rank 0."""
        missing, deadline = [*range(self.outer.world_size)], time.monotonic() + self._timeout_s
        while missing := [rank for rank in missing if not self._store.check([f"facts/{rank}"])]:
            if time.monotonic() > deadline:
                raise ResourceError(
                    f"{self.outer.name} started {self.outer.world_size} processes. {len(missing)} of them did not "
                    f"reach rank 0 on {self.node} within parallel.start_timeout_s ({self._timeout_s:g} s): "
                    f"rank {listed([*map(str, missing)])}"
                )
            time.sleep(_POLL_S)
        return [
            RankFacts.model_validate_json(self._store.get(f"facts/{rank}")) for rank in range(self.outer.world_size)
        ]

    def send(self, command: Command) -> None:
        """Give the other ranks a command. For rank 0."""
        self._store.set(f"command/{self.number}", command.model_dump_json())
        self.number += 1

    def end(self, exit_code: int) -> None:
        """Send the other ranks how the run ended; wait a while until all that live know. For rank 0."""
        read, deadline = f"read/{self.number}", time.monotonic() + _FAREWELL_S
        self.send(Command(exit_code=exit_code))
        while self._store.add(read, 0) < self.outer.world_size - 1 and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def receive(self) -> Command:
        """Wait for rank 0's next command; DistError if its store is gone. For the other ranks."""
        key = f"command/{self.number}"
        while not self._store.check([key]):
            time.sleep(_COMMAND_POLL_S)  # not often: rank 0 answers all ranks while it measures
        command = Command.model_validate_json(self._store.get(key))
        if self._store.add(f"read/{self.number}", 1) == self.outer.world_size - 1:
            self._store.delete_key(key)  # it contains the key of the trial's channel
        self.number += 1
        return command


@cache
def join(outer: OuterLauncher, *, timeout_s: float) -> Group:
    """Return this process's group, and join it first at the first call."""
    with undisturbed():
        import torch  # noqa: F401 - takes seconds
    return Group(outer, timeout_s=timeout_s)


@cache
def facts_of_all(outer: OuterLauncher, *, timeout_s: float) -> list[RankFacts]:
    """Return the facts of all ranks, in the order of ranks. For rank 0."""
    group = join(outer, timeout_s=timeout_s)
    group.publish()
    return group.gather()


def resources_of_all(outer: OuterLauncher, parallel: Parallel) -> Resources:
    """Return what all ranks have together. For rank 0."""
    facts = facts_of_all(outer, timeout_s=parallel.start_timeout_s)
    refuse_others(facts)
    return combine_facts(facts)


# What commands call


@contextmanager
def leading(experiment: Experiment) -> Iterator[None]:
    """Lead the other ranks of an outer launcher, if there is one: at the end of the block they learn how it ended."""
    if (outer := outer_launcher()) is None:
        yield
        return
    if (launcher := experiment.parallel.launcher) != _LAUNCHER:
        raise UsageError(
            f"parallel.launcher: is {launcher}, but {outer.name} started this process. "
            f"Add parallel.launcher={_LAUNCHER}, or start it with pipeline run alone."
        )
    group, code = join(outer, timeout_s=experiment.parallel.start_timeout_s), 1
    try:
        yield
        code = 0
    except BaseException as error:
        code = getattr(error, "exit_code", 1)
        if isinstance(error, KeyboardInterrupt):
            code = 143 if isinstance(error, Terminated) else 130
        raise
    finally:
        # The launcher may end this process as soon as another rank has exited; how the run ended is decided.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with suppress(RuntimeError):  # the launcher that serves the store has ended
            group.end(code)


def check_workers(plan: Plan) -> Plan:
    """Return the plan, after a check that its trials use all processes of an outer launcher, or one."""
    if (outer := outer_launcher()) is None:
        return plan
    for trial in plan.trials:
        started = f"{outer.name} started {outer.world_size} processes"
        if trial is plan.main and trial.workers != outer.world_size:
            raise UsageError(f"parallel.workers: is {trial.workers}, but {started}. Make the numbers equal.")
        if trial.workers not in (1, outer.world_size):
            raise UsageError(
                f"{started}, but {trial.name} has {trial.workers} workers. "
                f"Set 1 or {outer.world_size} workers under benchmark.baseline, or add --no-baseline."
            )
    return plan


def follow(experiment: Experiment) -> None:
    """Be a rank other than 0: work on rank 0's trials, until the end of the run."""
    outer = outer_launcher()
    assert outer is not None
    if experiment.parallel.launcher != _LAUNCHER:
        sys.exit(UsageError.exit_code)  # rank 0 says why
    # Python's own handler would wait until torch's C code has returned, and it waits for the other ranks.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    group = join(outer, timeout_s=experiment.parallel.start_timeout_s)
    from torch.distributed import DistError

    gone = f"rank {outer.rank} on {group.node} lost the connection to rank 0, which drives the run"
    try:
        group.publish()
        while (command := group.receive()).trial:
            _work(command, group, gone=gone)
    except (DistError, ConnectionError) as error:
        raise TrainingError(gone) from error
    except KeyboardInterrupt:  # a terminal sends it to all; rank 0 says how to continue
        sys.exit(130)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if command.exit_code:
        sys.exit(command.exit_code)


class _Outbox(ChannelOutbox):
    """Outbox of a rank other than 0. From the training's first question on, SIGTERM to this rank asks for a stop."""

    grace_s = 0.0
    _has_handler = False

    @property
    def stop_asked(self) -> bool:
        """True if the training is asked to end early."""
        if not self._has_handler:
            self._has_handler = True
            on_sigterm(self._stop)
        return super().stop_asked

    def _stop(self) -> None:
        self.ask_to_stop()
        end_after(self.grace_s)


def _work(command: Command, group: Group, *, gone: str) -> None:
    """Work on a trial as a rank other than 0."""
    from pipeline import worker

    trial, address = trial_from_json(command.trial), Address.parse(command.channel)
    rank = _enter(trial, group, command.gpus, host=address.host)
    store = group.connected(f"ranks/{group.outer.attempt}/{group.number}")
    with (
        _Outbox(address, rank=rank.rank, folder=Path(trial.folder), last_words=gone) as outbox,
        suppress(worker.WorkerFailed),  # rank 0 says how the run goes on
    ):
        outbox.grace_s = trial.experiment.parallel.grace_s
        worker.run(trial, rank, outbox, store=store, end=partial(worker.end_process, outbox.close))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _enter(trial: Trial, group: Group, gpus: Sequence[int | None], *, host: str) -> Rank:
    """Prepare this process for a trial, whose inbox is at ``host``; return its rank."""
    from threadpoolctl import threadpool_limits

    outer = group.outer
    network = interface_variables(address_facing(host)) if host != LOOPBACK else {}
    os.environ.update(outer.variables | network, OMP_NUM_THREADS=str(trial.cpus_per_worker))
    threadpool_limits(trial.cpus_per_worker)  # libraries have read the variable before
    return Rank(
        rank=outer.rank,
        local_rank=outer.local_rank,
        world_size=outer.world_size,
        local_world_size=outer.local_world_size,
        node=group.node,
        gpu=gpus[outer.rank],
    )


# Rank 0


def launch(attempt: Attempt, outer: OuterLauncher, stop: StopRequest) -> Outcome:
    """Run a trial on all ranks, as rank 0: it trains in a thread, so that this one sees signals and who hangs."""
    trial = attempt.trial
    timeout_s = trial.experiment.parallel.start_timeout_s
    group, facts = join(outer, timeout_s=timeout_s), facts_of_all(outer, timeout_s=timeout_s)
    host = LOOPBACK
    if outer.has_several_nodes:
        far = (each.address for each in facts[1:] if not is_loopback(each.address))
        host = address_facing(next(far, outer.host))
    gpus = find_gpus(facts, each=max(1, trial.devices_per_worker))
    if trial.device == "cuda" and None in gpus:
        bare = gpus.index(None)
        raise ResourceError(
            f"rank {bare} on {facts[bare].resources.node} has no GPU of its own: other ranks of its node take all that "
            "it sees. Start at most one rank per GPU, or show each rank only its own GPU (srun: --gpus-per-task=1)."
        )
    with attempt.listening(host) as address:
        group.send(Command(trial=trial.model_dump_json(), channel=str(address), gpus=gpus))
        rank = _enter(trial, group, gpus, host=host)
        store = group.connected(f"ranks/{outer.attempt}/{group.number}")
        training = threading.Thread(target=_train, args=(attempt, rank, store, stop), name="rank 0", daemon=True)
        training.start()
        try:
            losses = await_ends(attempt, training, deadline=time.monotonic() + timeout_s)
        except Terminated:  # perhaps by the launcher, which has noticed a lost rank first
            time.sleep(_KNOWN_S)
            if not (losses := dict.fromkeys(attempt.lost, _DIED)):
                raise
        finally:
            abandon(training)  # it may wait for a rank that is lost
    outcome = attempt.outcome(losses | {rank: how for rank, how in attempt.silent.items() if rank in losses})
    if losses and stop.asked and time.monotonic() - stop.asked_at < 2 * SAME_S:
        stop.why = outcome.error  # for which the launcher has sent SIGTERM
    return replace(outcome, nodes={each.rank: each.resources.node for each in facts})


def _train(attempt: Attempt, rank: Rank, store: "Store", stop: StopRequest) -> None:
    from pipeline import worker

    outbox = DirectOutbox(Path(attempt.trial.folder), attempt.receive_sent, is_stopping=lambda: stop.asked)
    try:
        # This process records: when it hangs, it waits instead of ending.
        if not worker.run(attempt.trial, rank, outbox, store=store, end=threading.Event().wait):
            stop.ask()  # perhaps another rank has been asked
    except worker.WorkerFailed:
        pass  # it has been reported, and the run's log has the traceback
    finally:
        attempt.hung_up(0)


def await_ends(attempt: Attempt, training: threading.Thread, *, deadline: float) -> dict[int, str]:
    """Wait until all ranks have ended, or one has failed and the others had time to say more; return who was lost."""
    ranks, failed_at = set(range(attempt.trial.workers)), None
    while True:
        are_over, now = ranks <= attempt.ended, time.monotonic()
        failures = attempt.outcome().failures
        if attempt.lost:
            return dict.fromkeys(attempt.lost, _DIED)
        if are_over and not training.is_alive():
            return {}
        if failures:
            failed_at = failed_at or now
            is_own = any(failure.origin == "rank" for failure in failures)
            if are_over or now - failed_at > (_LOSS_S if is_own else _LAST_REPORTS_S):
                return {} if is_own else dict.fromkeys(ranks - attempt.ended, _DIED)  # whom the others have failed for
        if now > deadline and (late := ranks - attempt.nodes.keys()):
            limit = attempt.trial.experiment.parallel.start_timeout_s
            return dict.fromkeys(late, f"it did not start within parallel.start_timeout_s ({limit:g} s)")
        time.sleep(_POLL_S / 2)

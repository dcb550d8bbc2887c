"""Runs within an outer launcher (``torchrun``, ``srun``, ``mpirun``): rank 0 leads, the other ranks follow.

Rank 0's process is the driver, with journal, MLflow and terminal. The other ranks say nothing: they work on the trials
that rank 0 assigns, and exit with its exit code.
"""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING

from pipeline.config.parallel import Parallel
from pipeline.errors import PipelineError, Terminated, TrainingError, UsageError
from pipeline.planning.outer_launcher import OuterLauncher, outer_launcher
from pipeline.planning.plan import Plan
from pipeline.system.imports import undisturbed
from pipeline.system.process import environment
from pipeline.system.signals import end_after, on_sigterm

if TYPE_CHECKING:
    from pipeline.launchers._outer_group import Command, OuterGroup
    from pipeline.protocol.channel.outbox import ChannelOutbox

_LAUNCHER = "torchrun"
"""Value of ``parallel.launcher`` for workers that an outer launcher has started: they have torchrun's variables."""


@contextmanager
def leading(parallel: Parallel) -> Iterator[None]:
    """Lead the other ranks of an outer launcher, if there is one: at the end of the block they learn how it ended.

    Raises:
        UsageError: the experiment asks for another launcher.
        ResourceError: the ranks can't be connected.
    """
    if (outer := outer_launcher()) is None:
        yield
        return
    if parallel.launcher != _LAUNCHER:
        raise UsageError(
            f"parallel.launcher: is {parallel.launcher}, but {outer.name} started this process. "
            f"Add parallel.launcher={_LAUNCHER}, or start it with pipeline run alone."
        )
    with environment(**outer.variables):
        group, code = _group(outer, parallel), 1

        def terminated(*_: object) -> None:
            if not group.is_failing:  # else the launcher ends all ranks because one of them has died
                raise Terminated

        signal.signal(signal.SIGTERM, terminated)
        try:
            with group.hearing_stops():
                yield
            code = 0
        except BaseException as error:
            code = _exit_code(error)
            raise
        finally:
            # The launcher may end this process as soon as another rank has exited; how the run ended is decided.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            with suppress(RuntimeError):  # the launcher that serves the store has ended
                group.end(code)


def check_workers(plan: Plan) -> Plan:
    """Return the plan, after a check that its trials use all processes of an outer launcher, or one.

    Raises:
        UsageError: a trial has another number of workers.
    """
    if (outer := outer_launcher()) is None:
        return plan
    for trial in plan.trials:
        if trial is plan.main and trial.workers != outer.world_size:
            wanted = plan.experiment.parallel
            allowed = f"{wanted.least_workers} to {wanted.workers}" if wanted.is_elastic else str(wanted.workers)
            raise UsageError(
                f"parallel.workers: is {allowed}, but {outer.name} started {outer.world_size} processes. "
                "Make the numbers equal."
            )
        if trial.workers not in (1, outer.world_size):
            raise UsageError(
                f"{outer.name} started {outer.world_size} processes, but {trial.name} has {trial.workers} workers. "
                f"Set 1 or {outer.world_size} workers under compare, or add --no-baseline."
            )
    return plan


def follow(parallel: Parallel) -> None:
    """Run this process as one of the workers of rank 0's trials.

    Raises:
        TrainingError: rank 0 has ended.
        ResourceError: rank 0 can't be reached.
        SystemExit: the run has not succeeded; with rank 0's exit code.
    """
    outer = outer_launcher()
    assert outer is not None
    if parallel.launcher != _LAUNCHER:
        sys.exit(UsageError.exit_code)  # rank 0 says why
    with environment(**outer.variables):
        code = _Follower(outer, parallel).work()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if code:
        sys.exit(code)


class _Follower:
    """A rank other than 0, from its first sign to the end of the run."""

    def __init__(self, outer: OuterLauncher, parallel: Parallel) -> None:
        self._outer, self._parallel = outer, parallel
        self._has_to_stop = False
        self._group: OuterGroup | None = None
        self._outbox: ChannelOutbox | None = None
        """Channel to the driver while a trial runs."""

    def work(self) -> int:
        """Work on all trials; return the exit code of the run."""
        on_sigterm(self._ask_to_stop)
        self._group = group = _group(self._outer, self._parallel)
        from torch.distributed import DistError

        from pipeline.launchers._outer_ranks import own_facts

        if self._has_to_stop:
            group.ask_to_stop()
        gone = f"rank {group.rank.rank} on {group.rank.node} lost the connection to rank 0, which drives the run"
        try:
            group.publish(own_facts(group).model_dump_json())
            while (command := group.next_command()).trial:
                self._work_on(command, gone=gone)
        except (DistError, ConnectionError) as error:
            raise TrainingError(gone) from error
        except KeyboardInterrupt:  # a terminal sends it to all; rank 0 says how to continue
            sys.exit(130)
        return command.exit_code

    def _work_on(self, command: "Command", *, gone: str) -> None:
        with undisturbed():
            from pipeline.worker import main
        from pipeline.protocol.channel.outbox import ChannelOutbox
        from pipeline.protocol.trial import trial_from_json
        from pipeline.worker.interfaces import (
            LOOPBACK,
            address_facing,
            connections_ended_by_failure,
            interface_variables,
        )
        from pipeline.worker.process_group import abort_on_failure

        assert self._group is not None
        assert command.channel is not None
        trial, host = trial_from_json(command.trial), command.channel.host
        wanted = self._parallel.network_interface
        own = interface_variables(address_facing(host), wanted=wanted) if host != LOOPBACK else {}
        with environment(**own), ChannelOutbox(command.channel, last_words=gone) as outbox, suppress(main.WorkerFailed):
            outbox.stop_asked |= self._has_to_stop
            self._outbox = outbox
            end = partial(main.end_process, outbox.close)
            store = self._group.store(command)
            freed = (
                abort_on_failure(self._group.failures(command), end=end) if trial.device == "cuda" else nullcontext()
            )
            with connections_ended_by_failure(), freed:
                main.run(trial, rank=self._group.rank_in(command), outbox=outbox, end=end, store=store)
        self._outbox = None

    def _ask_to_stop(self) -> None:
        """Stop at SIGTERM: all ranks agree on a step to stop at; the driver ends the run."""
        self._has_to_stop = True
        if self._outbox is not None:
            self._outbox.stop_asked = True
            end_after(self._parallel.grace_s, unless=lambda: self._outbox is None)
        if self._group is not None:  # in a thread: the store may be in use where the signal came
            Thread(target=self._group.ask_to_stop, name="stop-request", daemon=True).start()


def _group(outer: OuterLauncher, parallel: Parallel) -> "OuterGroup":
    with undisturbed():
        from pipeline.launchers._outer_group import joined  # imports torch, which takes seconds
    return joined(outer, timeout_s=parallel.start_timeout_s)


def _exit_code(error: BaseException) -> int:
    """Return the exit code with which the command line answers to an error."""
    if isinstance(error, PipelineError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return 143 if isinstance(error, Terminated) else 130
    return 1

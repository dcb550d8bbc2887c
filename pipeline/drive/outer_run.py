"""Runs within an outer launcher (``torchrun``, ``srun``): rank 0 leads, the other ranks follow.

Rank 0's process is the driver, with journal, MLflow and terminal; it starts rank 0's worker. The processes of other
ranks print nothing: each starts its rank's worker for the trials that rank 0 assigns, and exits with rank 0's code.
"""

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING

from pipeline.errors import PipelineError, Terminated, TrainingError, UsageError
from pipeline.experiment.schema import Experiment, Parallel
from pipeline.experiment.summary import flatten
from pipeline.plan.outer_launcher import OuterLauncher, outer_launcher
from pipeline.plan.plan import Plan
from pipeline.system.child import end_with_parent
from pipeline.system.imports import undisturbed
from pipeline.system.process import can_fork, environment
from pipeline.system.signals import end_after, on_sigterm

if TYPE_CHECKING:
    from pipeline.launch._outer_group import Command, OuterGroup

_LAUNCHER = "torchrun"
"""Value of ``parallel.launcher`` for workers that an outer launcher has started: they have torchrun's variables."""
_REPORT_S = 5.0
"""Seconds within which a rank that can't take part reports its error to rank 0."""
_END_S = 3.0
"""Seconds that a worker gets to end by itself once rank 0 sends the next command: it may wait for a GPU for ever."""


@contextmanager
def leading(experiment: Experiment) -> Iterator[None]:
    """Lead the other ranks of an outer launcher, if there is one: at the end of the block they learn how it ended.

    Raises:
        UsageError: the experiment asks for another launcher.
        ResourceError: the ranks can't be connected.
    """
    if (outer := outer_launcher()) is None:
        yield
        return
    if (launcher := experiment.parallel.launcher) != _LAUNCHER:
        raise UsageError(
            f"parallel.launcher: is {launcher}, but {outer.name} started this process. "
            f"Add parallel.launcher={_LAUNCHER}, or start it with pipeline run alone."
        )
    group, code = _group(outer, experiment), 1
    try:
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


def report_failure(error: PipelineError) -> None:
    """Send rank 0 the error of this rank, which can't take part, if torchrun's own store can be reached.

    Where rank 0 would open the store, it may have failed as well. It then notices the missing rank by itself.
    """
    outer = outer_launcher()
    if outer is None or outer.is_driver or not outer.has_store:
        return
    with suppress(RuntimeError, ConnectionError, PipelineError):
        _join(outer, timeout_s=_REPORT_S).report_failure(str(error))


def follow(experiment: Experiment) -> None:
    """Start this rank's workers for rank 0's trials, until the end of the run.

    Raises:
        TrainingError: rank 0 has ended.
        ResourceError: rank 0 can't be reached.
        SystemExit: the run has not succeeded; with rank 0's exit code.
    """
    outer, parallel = outer_launcher(), experiment.parallel
    assert outer is not None
    if parallel.launcher != _LAUNCHER:
        sys.exit(UsageError.exit_code)  # rank 0 says why
    stops: list[bool] = []
    on_sigterm(lambda: stops.append(True))
    group, worker = _group(outer, experiment), None
    from torch.distributed import DistError

    from pipeline.launch._outer_ranks import own_facts

    gone = f"rank {outer.rank} on {group.node} lost the connection to rank 0, which drives the run"
    try:
        group.publish(own_facts(group).model_dump_json())
        while (command := group.next_command(has_to_stop=lambda: bool(stops))).trial:
            _end(worker)
            worker = _start_worker(command, group=group, gone=gone, parallel=parallel)
    except (DistError, ConnectionError) as error:
        raise TrainingError(gone) from error
    except KeyboardInterrupt:  # a terminal sends it to all; rank 0 says how to continue
        sys.exit(130)
    finally:
        _end(worker)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if command.exit_code:
        sys.exit(command.exit_code)


def _start_worker(command: "Command", *, group: "OuterGroup", gone: str, parallel: Parallel) -> BaseProcess:
    """Start this rank's worker for a trial: forked from this process if that is safe, else a new one."""
    from pipeline.protocol.trial import trial_from_json
    from pipeline.worker.interfaces import LOOPBACK, address_facing, interface_variables

    assert command.channel is not None
    host, cpus = command.channel.host, trial_from_json(command.trial).cpus_per_worker
    network = interface_variables(address_facing(host)) if host != LOOPBACK else {}
    context = multiprocessing.get_context("fork" if can_fork() else "spawn")
    worker = context.Process(target=_work, args=(command, gone, parallel.grace_s))  # type: ignore[attr-defined]
    with environment(**group.variables(command, cpus=cpus), **network):
        worker.start()
    return worker  # type: ignore[no-any-return]


def _work(command: "Command", gone: str, grace_s: float) -> None:
    """Work on a trial, in a process of its own; at SIGTERM all ranks agree on a step to stop at."""
    end_with_parent()
    os.setsid()  # Ctrl-C is for the driver
    gc.freeze()  # a collection would write to all of the memory that is shared with the parent
    from threadpoolctl import threadpool_limits

    from pipeline.protocol.channel.outbox import ChannelOutbox
    from pipeline.protocol.trial import trial_from_json
    from pipeline.worker import main

    assert command.channel is not None
    threadpool_limits(int(os.environ["OMP_NUM_THREADS"]))  # libraries have read it before, when there was one
    trial, rank = trial_from_json(command.trial), main.rank_from_environment()
    with ChannelOutbox(command.channel, last_words=gone) as outbox, suppress(main.WorkerFailed):

        def stop() -> None:
            outbox.stop_asked = True
            end_after(grace_s)

        on_sigterm(stop)
        main.run(trial, rank=rank, outbox=outbox, end=partial(main.end_process, outbox.close))


def _end(worker: BaseProcess | None) -> None:
    """End a worker and its loader processes, if it doesn't end by itself."""
    if worker is not None and worker.pid is not None:
        worker.join(_END_S)
        with suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        worker.join()


def _group(outer: OuterLauncher, experiment: Experiment) -> "OuterGroup":
    group = _join(outer, timeout_s=experiment.parallel.start_timeout_s)
    group.settings = flatten(experiment)
    return group


def _join(outer: OuterLauncher, *, timeout_s: float) -> "OuterGroup":
    with undisturbed():
        from pipeline.launch._outer_group import joined  # imports torch, which takes seconds
    return joined(outer, timeout_s=timeout_s)


def _exit_code(error: BaseException) -> int:
    """Return the exit code with which the command line answers to an error."""
    if isinstance(error, PipelineError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return 143 if isinstance(error, Terminated) else 130
    return 1

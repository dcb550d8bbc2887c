"""The process group of a trial's ranks: destroyed after success or a stop, aborted after a failure.

With NCCL, destroying a group waits for its kernels, which wait for the other ranks. A rank that failed would hang.
"""

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from pipeline import registry
from pipeline.errors import Stopped
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import Trial
from pipeline.train.ranks import device_of
from pipeline.worker import rendezvous

_log = logging.getLogger(__name__)
_NCCL_LATER_S = 60.0
"""Seconds that NCCL's timeout is longer than the hang detector's: at its end NCCL kills the process with SIGABRT."""
_ABORT_S = 10.0
"""Seconds for an abort, and for what waits for it to end, after which the process ends."""


@contextmanager
def process_group(trial: Trial, *, rank: Rank, end: Callable[[], None] | None) -> Iterator[None]:
    """Join the process group of this trial's ranks, at the address that their launcher has set.

    Args:
        trial: the trial.
        rank: the rank of this process.
        end: ends this process if the group can't be aborted; None in the driver's process, which continues.
    """
    strategy = registry.load("strategies", trial.strategy).Strategy
    if dist.is_initialized() or not (rank.world_size > 1 or strategy.needs_process_group):
        yield  # a process that runs several trials, as in tests, keeps its group
        return
    timeout = timedelta(seconds=trial.experiment.parallel.timeout_s)
    device = device_of(trial, rank=rank)
    uses_gpus = device.type == "cuda"
    store = rendezvous.store(rank, timeout=timeout)
    dist.init_process_group(
        backend="nccl" if uses_gpus else "gloo",
        timeout=timeout + timedelta(seconds=_NCCL_LATER_S) if uses_gpus else timeout,
        store=store,
        rank=rank.rank,
        world_size=rank.world_size,
        device_id=device if uses_gpus else None,
    )
    has_failed = True
    try:
        yield
        has_failed = False
    except Stopped:  # all ranks have agreed to stop
        has_failed = False
        raise
    finally:
        if has_failed:
            _abort(end)
        else:
            # DDP's reducer, in a reference cycle, holds the group. A collection that frees it last joins the group's
            # threads while it holds the interpreter's lock, for which one of them may wait: a deadlock.
            gc.collect()
            dist.destroy_process_group()
        # DDP's reference cycles keep the group's threads alive; one of them that wants the interpreter after it has
        # shut down aborts the process.
        gc.collect()


def _abort(end: Callable[[], None] | None) -> None:
    """Abort all groups, also if other ranks wait in a collective; end the process if that takes too long."""
    thread = threading.Thread(target=_abort_all, name="abort", daemon=True)
    thread.start()
    thread.join(_ABORT_S)
    if thread.is_alive():
        _log.warning("the process group could not be aborted within %g s", _ABORT_S)
        if end is not None:
            end()


def _abort_all() -> None:
    try:
        if dist.is_initialized():
            dist.distributed_c10d._abort_process_group()
    except Exception as error:  # noqa: BLE001 - the rank's own error counts, which has been reported
        _log.warning("the process group could not be aborted", exc_info=error)

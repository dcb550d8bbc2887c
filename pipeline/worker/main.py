"""Main function of a worker: one rank of one trial in one process. Every launcher runs it.

Any rank can be replayed by hand: ``python -m pipeline.worker.main runs/<id>/trials/main.json`` trains rank 0 alone, or
under ``torchrun`` as many ranks as it starts, and prints its events.
"""

import argparse
import gc
import logging
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import psutil
import torch

from pipeline.errors import ExperimentError, PipelineError, Stopped
from pipeline.experiment import references
from pipeline.protocol.channel.outbox import ChannelOutbox
from pipeline.protocol.channel.wire import Address
from pipeline.protocol.events import (
    AnyEvent,
    Checked,
    Evaluated,
    Failed,
    Finished,
    Heartbeat,
    Outbox,
    Warned,
    event_to_json,
)
from pipeline.protocol.progress import report_progress_to
from pipeline.protocol.rank import GPU_VARIABLE, Rank
from pipeline.protocol.trial import BatchCheck, Evaluation, Training, Trial, trial_from_json
from pipeline.system import allocator
from pipeline.system.leftovers import Leftovers, exit_despite_threads
from pipeline.system.process import raise_limit_of_open_files
from pipeline.system.signals import end_after, on_sigterm
from pipeline.train import compilation, errors
from pipeline.train.loader import close_new_loaders
from pipeline.train.ranks import set_backends
from pipeline.train.restored import evaluate_checkpoint
from pipeline.train.run import check_batch, train
from pipeline.train.watch import Watchdog, mark_failure
from pipeline.worker.process_group import process_group
from pipeline.worker.system_metrics import system_sampled

_log = logging.getLogger(__name__)
_REQUEST_S = 1.0
"""Seconds after SIGTERM within which the driver's stop request must arrive; else the worker ends."""


class WorkerFailed(Exception):
    """The rank failed and has reported it to the driver."""


def run(trial: Trial, *, rank: Rank, outbox: Outbox, end: Callable[[], None] | None = None) -> None:
    """Run a trial on this rank; send its result or its error to the driver.

    Args:
        trial: the trial.
        rank: the rank of this process.
        outbox: channel to the driver.
        end: ends this process when it hangs; None in the driver's own process, where a hang is only reported.

    Raises:
        WorkerFailed: after the failure has been reported.
    """
    raise_limit_of_open_files()
    torch.set_num_threads(trial.cpus_per_worker)
    # One sampler for each node; a measurement is short and shouldn't be disturbed.
    samples = rank.local_rank == 0 and isinstance(trial, Training)
    declared = trial.experiment.train
    report = partial(_failure_reported, trial, rank=rank, outbox=outbox)
    try:
        with (
            report(),
            set_backends(precision=declared.matmul_precision, times_cudnn=declared.cudnn_benchmark),
            allocator.huge_pages(),
            allocator.keep_freed_memory(),
            report_progress_to(outbox.event, trial=trial.name),
            Watchdog(trial.name, rank=rank, outbox=outbox, timeout_s=trial.experiment.parallel.timeout_s, end=end),
            process_group(trial, rank=rank, end=end),
            close_new_loaders(),
            report(),  # before the end of what is above, which may hang or fail in turn
            system_sampled(trial, rank, outbox) if samples else nullcontext(),
        ):
            outcome = _run_trial(trial, rank=rank, outbox=outbox)
    except Stopped:  # the driver, which asked for it, doesn't wait for a result
        return
    if rank.is_first:
        outbox.event(outcome)


def warning_of(rank: Rank, *, trial: Trial, outbox: Outbox) -> Callable[[str], None]:
    """Return a function that sends a warning of this rank to the driver."""

    def warn(message: str) -> None:
        where = f"rank {rank.rank}: " if rank.world_size > 1 else ""
        outbox.event(Warned(trial=trial.name, message=f"{where}{message}"))

    return warn


def log_traceback() -> None:
    """Write the traceback of the current exception to this rank's log file, without values of the environment."""
    sys.stderr.write(references.redact(traceback.format_exc()))


def end_process(close: Callable[[], None]) -> None:
    """End this process, whatever its other threads do; ``close`` first sends the remaining events."""
    close()
    for child in psutil.Process().children(recursive=True):  # a loader process that hangs would outlive it
        child.kill()
    os._exit(1)


def rank_from_environment() -> Rank:
    """Return the rank that ``torchrun`` gave this process; rank 0 of 1 without ``torchrun``."""
    gpu = os.environ.get(GPU_VARIABLE)
    return Rank(
        rank=int(os.environ.get("RANK", "0")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        node=socket.gethostname(),
        gpu=int(gpu) if gpu is not None else None,
    )


def _run_trial(trial: Trial, *, rank: Rank, outbox: Outbox) -> Finished | Evaluated | Checked:
    """Run the trial and return its result."""
    if isinstance(trial, BatchCheck):
        check_batch(trial, rank=rank, outbox=outbox)
        return Checked(trial=trial.name)
    with compilation.explained(trial.experiment.train.compile):
        if isinstance(trial, Evaluation):
            return evaluate_checkpoint(trial, rank=rank, outbox=outbox)
        result = train(trial, rank=rank, outbox=outbox)
    return Finished(trial=trial.name, result=result)


@contextmanager
def _failure_reported(trial: Trial, *, rank: Rank, outbox: Outbox) -> Iterator[None]:
    """Send an error of the block to the driver at once.

    Raises:
        WorkerFailed: after that.
    """
    try:
        yield
    except (Stopped, WorkerFailed):
        raise
    except (Exception, SystemExit) as error:  # user code may call exit()
        mark_failure()
        outbox.event(_failed(trial, rank=rank, error=error))
        raise WorkerFailed from error


def _failed(trial: Trial, *, rank: Rank, error: BaseException) -> Failed:
    # The user gets a part of the traceback, or one line. The rank's log has the whole.
    if error.__cause__ is not None or not isinstance(error, PipelineError):
        _log.warning("%s", references.redact("".join(traceback.format_exception(error)).rstrip()))
    problems = error.problems if isinstance(error, ExperimentError) else ()
    if isinstance(error, PipelineError):
        message, details = str(error), getattr(error, "details", "")
    else:
        message, details = f"{type(error).__name__}: {error}{errors.hint(error)}", _own_traceback(error)
    return Failed(
        trial=trial.name,
        rank=rank,
        error=references.redact(message),
        traceback=references.redact(details),
        problems=tuple(each._replace(message=references.redact(each.message)) for each in problems),
        is_out_of_memory=errors.is_out_of_memory(error),
        origin=errors.origin(error),
    )


def _own_traceback(error: BaseException) -> str:
    """Return the traceback without frames of this project and of torch; empty if no others are left.

    The whole if the error is raised in this project's code, as it may be a bug of its own.
    """
    shown = traceback.TracebackException.from_exception(error)
    link: traceback.TracebackException | None = shown
    is_raised_by_us = shown.stack[-1].filename.startswith(errors.OURS)
    while link is not None:
        own = [one for one in link.stack if not one.filename.startswith((errors.OURS, errors.TORCH))]
        link.stack, link = traceback.StackSummary.from_list(own), link.__cause__ or link.__context__
    if not shown.stack and is_raised_by_us:
        return "".join(traceback.format_exception(error))
    return "".join(shown.format()) if shown.stack else ""


class _PrintingOutbox:
    """Outbox of a rank that is replayed by hand: prints events as JSON lines, except heartbeats; sends no files."""

    stop_asked = False

    def event(self, event: AnyEvent) -> None:
        if not isinstance(event, Heartbeat):
            sys.stdout.write(event_to_json(event).decode() + "\n")

    def file(self, path: Path, name: str) -> None:
        """Send nothing."""


def main() -> None:
    """Run a worker process whose rank is in ``torchrun``'s environment variables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trial", type=Path, help="JSON of the trial")
    parser.add_argument("--channel", type=Path, help="JSON of the driver's address; events are printed without it")
    arguments = parser.parse_args()
    leftovers = Leftovers()
    trial = trial_from_json(arguments.trial.read_text())
    rank = rank_from_environment()
    try:
        if arguments.channel is None:
            run(trial, rank=rank, outbox=_PrintingOutbox())
            return
        with ChannelOutbox(Address.model_validate_json(arguments.channel.read_text())) as outbox:
            # The driver gets a job's SIGTERM, too, and asks the workers to stop. Without such a request this one ends.
            on_sigterm(partial(end_after, _REQUEST_S, unless=lambda: outbox.stop_asked))
            run(trial, rank=rank, outbox=outbox, end=partial(end_process, outbox.close))
            leftovers.end(warning_of(rank, trial=trial, outbox=outbox))
    except WorkerFailed:
        log_traceback()
        leftovers.end(_log.warning)
        exit_despite_threads(1)
        sys.exit(1)
    gc.freeze()  # the interpreter's end would look through all of torch
    exit_despite_threads(0)


if __name__ == "__main__":
    main()

"""Work of one rank, whichever launcher started it: `run` builds, trains, and sends what happens to the driver."""

import gc
import importlib
import itertools
import logging
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import psutil
import pynvml
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore

from pipeline import registry, system
from pipeline.errors import ExperimentError, PipelineError, ResourceError, Stopped
from pipeline.experiment import references
from pipeline.protocol.channel import Address, ChannelOutbox
from pipeline.protocol.events import (
    Evaluated,
    Failed,
    Finished,
    Outbox,
    Point,
    SystemMetrics,
)
from pipeline.protocol.progress import report_progress_to
from pipeline.protocol.trial import BatchCheck, Evaluation, Job, Rank, Training, Trial, trial_from_json
from pipeline.train import compilation, errors
from pipeline.train.loader import close_new_loaders
from pipeline.train.ranks import device_of, set_backends, uuid_of
from pipeline.train.restored import evaluate_checkpoint
from pipeline.train.run import check_batch, train
from pipeline.train.watch import Watchdog, mark_failure

_log = logging.getLogger(__name__)
INTERVAL_S = 5.0  # Seconds between two samples of a node's load
_REQUEST_S = 1.0  # Seconds after SIGTERM within which the driver's stop request must arrive; else the worker ends
_NCCL_LATER_S = 60.0
"""Seconds that NCCL's timeout is longer than the hang detector's: at its end NCCL kills the process with SIGABRT."""
_ABORT_S = 10.0  # Seconds for an abort, and for what waits for it to end, after which the process ends


class WorkerFailed(Exception):
    """The rank failed and has reported it to the driver."""


def run(
    trial: Trial, rank: Rank, outbox: Outbox, *, store: Store | None = None, end: Callable[[], object] | None = None
) -> bool:
    """Run a trial on this rank; send its result or its error to the driver. Return False if it was asked to stop."""
    system.raise_limit_of_open_files()
    torch.set_num_threads(trial.cpus_per_worker)
    # One sampler for each node; a measurement is short and shouldn't be disturbed.
    samples = rank.local_rank == 0 and isinstance(trial, Training)
    report = partial(_failure_reported, trial, rank, outbox)
    declared, timeout_s = trial.experiment.train, trial.experiment.parallel.timeout_s
    try:
        with (
            report(),
            set_backends(precision=declared.matmul_precision, times_cudnn=declared.cudnn_benchmark),
            system.huge_pages(),
            system.keep_freed_memory(),
            report_progress_to(outbox.event, trial=trial.name),
            Watchdog(trial.name, rank=rank, outbox=outbox, timeout_s=timeout_s, end=end),
            process_group(trial, rank, store=store, end=end),
            close_new_loaders(),
            report(),  # before the end of what is above, which may hang or fail in turn
            system_sampled(trial, rank, outbox) if samples else nullcontext(),
        ):
            if trial.folder and not Path(trial.folder).is_dir():
                raise ResourceError(
                    f"{socket.gethostname()} has no folder {trial.folder}. All nodes must share the folder of runs. "
                    "Set tracking.directory to a place that they share."
                )
            result: Finished | Evaluated | None = None
            if isinstance(trial, BatchCheck):
                check_batch(trial, rank=rank, outbox=outbox)
            else:
                with compilation.explained(trial.experiment.train.compile):
                    if isinstance(trial, Evaluation):
                        result = evaluate_checkpoint(trial, rank=rank, outbox=outbox)
                    else:
                        result = Finished(trial=trial.name, result=train(trial, rank=rank, outbox=outbox))
    except Stopped:  # the driver, which asked for it, doesn't wait for a result
        return False
    if rank.is_first and result is not None:
        outbox.event(result)
    return True


@contextmanager
def _failure_reported(trial: Trial, rank: Rank, outbox: Outbox) -> Iterator[None]:
    """Send an error of the block to the driver at once, then raise WorkerFailed."""
    try:
        yield
    except (Stopped, WorkerFailed):
        raise
    except (Exception, SystemExit) as error:  # user code may call exit()
        mark_failure()
        # The user gets a part of the traceback, or one line. The rank's log has the whole.
        if error.__cause__ is not None or not isinstance(error, PipelineError):
            _log.warning("%s", references.redact("".join(traceback.format_exception(error)).rstrip()))
        if isinstance(error, PipelineError):
            message, details = str(error), getattr(error, "details", "")
        else:
            message, details = f"{type(error).__name__}: {error}{errors.hint(error)}", _own_traceback(error)
        problems = error.problems if isinstance(error, ExperimentError) else ()
        outbox.event(
            Failed(
                trial=trial.name,
                rank=rank,
                error=references.redact(message),
                traceback=references.redact(details),
                problems=tuple(each._replace(message=references.redact(each.message)) for each in problems),
                is_out_of_memory=errors.is_out_of_memory(error),
                origin=errors.origin(error),
            )
        )
        raise WorkerFailed from error


def _own_traceback(error: BaseException) -> str:
    """Return the traceback without frames of this project and of torch; the whole of an error of our own code."""
    shown = traceback.TracebackException.from_exception(error)
    link: traceback.TracebackException | None = shown
    is_raised_by_us = shown.stack[-1].filename.startswith(errors.OURS)
    while link is not None:
        own = [one for one in link.stack if not one.filename.startswith((errors.OURS, errors.TORCH))]
        link.stack, link = traceback.StackSummary.from_list(own), link.__cause__ or link.__context__
    if not shown.stack and is_raised_by_us:
        return "".join(traceback.format_exception(error))
    return "".join(shown.format()) if shown.stack else ""


# Where ranks meet


@contextmanager
def process_group(trial: Trial, rank: Rank, *, store: Store | None, end: Callable[[], object] | None) -> Iterator[None]:
    """Join the process group of the trial's ranks: destroyed after success or a stop, aborted after a failure.

    With NCCL, destroying a group waits for its kernels, which wait for the other ranks: a rank that failed would hang.
    """
    strategy = registry.load("strategies", trial.strategy).Strategy
    if dist.is_initialized() or not (rank.world_size > 1 or strategy.needs_process_group):
        yield  # a process that runs several trials, as in tests, keeps its group
        return
    timeout = timedelta(seconds=trial.experiment.parallel.timeout_s)
    device = device_of(trial, rank=rank)
    uses_gpus = device.type == "cuda"
    store = store or find_store(rank, timeout=timeout)
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
            thread = threading.Thread(target=_abort_all, name="abort", daemon=True)
            thread.start()
            thread.join(_ABORT_S)
            if thread.is_alive():
                _log.warning("the process group could not be aborted within %g s", _ABORT_S)
                if end is not None:
                    end()
        else:
            # DDP's reducer, in a reference cycle, holds the group. A collection that frees it last joins the group's
            # threads while it holds the interpreter's lock, for which one of them may wait: a deadlock.
            gc.collect()
            dist.destroy_process_group()
        # DDP's reference cycles keep the group's threads alive; one of them that wants the interpreter after it has
        # shut down aborts the process.
        gc.collect()


def _abort_all() -> None:
    try:
        if dist.is_initialized():
            dist.distributed_c10d._abort_process_group()
    except Exception as error:  # noqa: BLE001 - the rank's own error counts, which has been reported
        _log.warning("the process group could not be aborted", exc_info=error)


def find_store(rank: Rank, *, timeout: timedelta) -> Store:
    """Return the store at MASTER_ADDR, which rank 0 opens unless torchrun has."""
    if rank.world_size == 1:
        return HashStore()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank.is_first and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        store = open_store(host, port, timeout=timeout, world_size=rank.world_size)
    else:
        store = TCPStore(host, port, world_size=rank.world_size, is_master=False, timeout=timeout)
    return PrefixStore(os.environ.get("TORCHELASTIC_RUN_ID", ""), store)


def open_store(host: str, port: int, *, timeout: timedelta, world_size: int | None = None) -> TCPStore:
    """Open a store that listens at one address, not at all as torch's, and waits for ``world_size`` ranks if given."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with closing(socket.socket(family, socket.SOCK_STREAM)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(socket.SOMAXCONN)
        return TCPStore(  # which closes the file descriptor that it is given
            host,
            listening.getsockname()[1],
            world_size=world_size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=world_size is not None,
            multi_tenant=world_size is None,
            master_listen_fd=listening.detach(),
        )


# The load of a node, by MLflow's own names, so that its UI shows it under "System metrics"


@contextmanager
def system_sampled(trial: Trial, rank: Rank, outbox: Outbox) -> Iterator[None]:
    """Sample this node in a thread inside the block, and once more at its end."""
    # MLflow puts the node into the name only where there are several.
    prefix = f"system/{rank.node}/" if rank.local_world_size < rank.world_size else "system/"
    count = trial.devices_per_worker * rank.local_world_size
    megabyte = 1e6

    def sample(done: threading.Event) -> None:
        psutil.cpu_percent()  # the first call only starts the interval
        start, handles = psutil.net_io_counters(), dict[int, object]()
        with suppress(pynvml.NVMLError):  # there is no GPU
            if count:
                pynvml.nvmlInit()
                for index in range(min(count, torch.cuda.device_count())):
                    with suppress(pynvml.NVMLError):  # e.g. an instance of a partitioned GPU (MIG)
                        handles[index] = pynvml.nvmlDeviceGetHandleByUUID(uuid_of(index))
        for number in itertools.count():
            ended = done.wait(INTERVAL_S if number else 1.0)
            memory, disk, network = psutil.virtual_memory(), psutil.disk_usage("/"), psutil.net_io_counters()
            values = {
                "cpu_utilization_percentage": psutil.cpu_percent(),
                "system_memory_usage_megabytes": memory.used / megabyte,
                "system_memory_usage_percentage": memory.percent,
                "disk_usage_percentage": disk.percent,
                "disk_available_megabytes": disk.free / megabyte,
                "network_receive_megabytes": (network.bytes_recv - start.bytes_recv) / megabyte,
                "network_transmit_megabytes": (network.bytes_sent - start.bytes_sent) / megabyte,
            }
            for index, handle in handles.items():
                with suppress(pynvml.NVMLError):  # some GPUs don't report everything, e.g. shared ones
                    own, used = pynvml.nvmlDeviceGetUtilizationRates(handle), pynvml.nvmlDeviceGetMemoryInfo(handle)
                    values |= {
                        f"gpu_{index}_utilization_percentage": float(own.gpu),
                        f"gpu_{index}_memory_usage_megabytes": used.used / megabyte,
                        f"gpu_{index}_memory_usage_percentage": 100 * used.used / used.total,
                        f"gpu_{index}_power_usage_watts": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
                    }
            points = tuple(Point(prefix + name, number, value) for name, value in values.items())
            outbox.event(SystemMetrics(node=rank.node, points=points))
            if ended:  # after the last sample: a short training has no other
                return

    with system.in_background(sample, name="system-metrics"):
        yield


# Processes of ranks


def log_traceback() -> None:
    """Write the traceback of the current exception to this rank's log file, without values of the environment."""
    sys.stderr.write(references.redact(traceback.format_exc()))


def end_process(close: Callable[[], None]) -> None:
    """End this process, whatever its other threads do; ``close`` first sends the remaining events."""
    close()
    for child in psutil.Process().children(recursive=True):  # a loader process that hangs would outlive it
        child.kill()
    os._exit(1)


def redirect_output(folder: Path, rank: Rank) -> None:
    """Redirect standard output and standard error, those of C libraries included, to files in a folder."""
    for stream, number, name in ((sys.stdout, 1, "stdout"), (sys.stderr, 2, "stderr")):
        stream.flush()
        with (folder / f"rank{rank.rank}-{name}.log").open("ab") as file:
            os.dup2(file.fileno(), number)


def work(libraries: Sequence[str]) -> None:
    """Be a process of the launcher ``torchrun``: import what a rank needs, then wait for the `Job` and do it."""
    for name in ("torch._dynamo", *libraries):  # torch's optimizers import torch._dynamo
        with suppress(Exception):  # the rank that needs it reports the error
            importlib.import_module(name)
    gc.freeze()  # a collection would look through all of torch
    gc.enable()
    if not (line := sys.stdin.readline()):
        return  # nobody needs it
    job = Job.model_validate_json(line)
    trial, rank = trial_from_json(Path(job.trial).read_text()), job.rank
    system.redirect_to_null(0)
    if job.output:
        redirect_output(Path(job.output), rank)
    with suppress(OSError):  # a sandbox may forbid it, and it is only what ps, top and nvidia-smi call the rank
        Path("/proc/self/comm").write_text(f"rank {rank.rank}")
    os.environ.update(rank.variables, OMP_NUM_THREADS=str(trial.cpus_per_worker))
    from threadpoolctl import threadpool_limits

    threadpool_limits(trial.cpus_per_worker)  # libraries have read the variable before
    try:
        with ChannelOutbox(Address.parse(job.channel), rank=rank.rank, folder=Path(trial.folder)) as outbox:
            # The driver gets a job's SIGTERM, too, and asks the workers to stop. Without such a request this one ends.
            system.on_sigterm(partial(system.end_after, _REQUEST_S, unless=lambda: outbox.stop_asked))
            store = FileStore(job.store, rank.world_size)
            run(trial, rank, outbox, store=store, end=partial(end_process, outbox.close))
    except WorkerFailed:
        log_traceback()
        system.exit_in_time(1)
    system.exit_in_time(0)

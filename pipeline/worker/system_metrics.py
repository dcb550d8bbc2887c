"""System metrics of a node, sampled during training: processor, memory, network, disk and GPUs.

Names are those of MLflow's own system metrics, so that its UI shows them under "System metrics".
"""

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
import pynvml
import torch

from pipeline.protocol.events import Outbox, Point, SystemMetrics
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import Trial
from pipeline.system.background import in_background
from pipeline.train.ranks import uuid_of

INTERVAL_SECONDS = 5.0
_MEGABYTE = 1e6


@contextmanager
def system_sampled(trial: Trial, rank: Rank, outbox: Outbox) -> Iterator[None]:
    """Sample this node in a thread inside the block, and once more at its end."""
    # MLflow puts the node into the name only where there are several.
    prefix = f"system/{rank.node}/" if rank.local_world_size < rank.world_size else "system/"

    def sample(done: threading.Event) -> None:
        psutil.cpu_percent()  # the first call only starts the interval
        start = psutil.net_io_counters()
        handles = dict(_open_gpus(trial, rank))
        for number in itertools.count():
            ended = done.wait(INTERVAL_SECONDS if number else 1.0)
            values = dict(_node(received=start.bytes_recv, sent=start.bytes_sent))
            for index, handle in handles.items():
                with suppress(pynvml.NVMLError):  # some GPUs don't report everything, e.g. shared ones
                    values.update(_gpu(index, handle))
            points = tuple(Point(prefix + name, number, value) for name, value in values.items())
            outbox.event(SystemMetrics(node=rank.node, points=points))
            if ended:  # after the last sample: a short training has no other
                return

    with in_background(sample, name="system-metrics"):
        yield


def _node(*, received: int, sent: int) -> Iterator[tuple[str, float]]:
    memory, disk, network = psutil.virtual_memory(), psutil.disk_usage("/"), psutil.net_io_counters()
    yield "cpu_utilization_percentage", psutil.cpu_percent()
    yield "system_memory_usage_megabytes", memory.used / _MEGABYTE
    yield "system_memory_usage_percentage", memory.percent
    yield "disk_usage_percentage", disk.percent
    yield "disk_available_megabytes", disk.free / _MEGABYTE
    yield "network_receive_megabytes", (network.bytes_recv - received) / _MEGABYTE
    yield "network_transmit_megabytes", (network.bytes_sent - sent) / _MEGABYTE


def _gpu(index: int, handle: object) -> Iterator[tuple[str, float]]:
    utilization, memory = pynvml.nvmlDeviceGetUtilizationRates(handle), pynvml.nvmlDeviceGetMemoryInfo(handle)
    yield f"gpu_{index}_utilization_percentage", float(utilization.gpu)
    yield f"gpu_{index}_memory_usage_megabytes", memory.used / _MEGABYTE
    yield f"gpu_{index}_memory_usage_percentage", 100 * memory.used / memory.total
    yield f"gpu_{index}_power_usage_watts", pynvml.nvmlDeviceGetPowerUsage(handle) / 1000


def _open_gpus(trial: Trial, rank: Rank) -> Iterator[tuple[int, object]]:
    """Open the GPUs that this node's ranks train on and CUDA shows to this rank; without NVML there are none."""
    wanted = trial.devices_per_worker * rank.local_world_size
    if not wanted:
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return
    for index in range(min(wanted, torch.cuda.device_count())):
        with suppress(pynvml.NVMLError):  # e.g. an instance of a partitioned GPU (MIG)
            yield index, pynvml.nvmlDeviceGetHandleByUUID(uuid_of(index))

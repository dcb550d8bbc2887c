"""GPUs of ranks: which one is a rank's, the check that each rank has its own, and what earlier trials left there."""

import gc
import os

import torch
from torch._C._distributed_c10d import Store

from pipeline.errors import ResourceError
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import Trial


def device_of(trial: Trial, *, rank: Rank) -> torch.device:
    """Return the device of a rank; the ranks of a node take its GPUs in order.

    Raises:
        ResourceError: CUDA shows fewer GPUs than ranks of this node.
    """
    if trial.device == "cpu":
        return torch.device("cpu")
    count, own = torch.cuda.device_count(), max(1, trial.devices_per_worker)
    by_position = rank.local_rank * own if count > own else 0  # srun may show each rank only its own GPUs
    index = by_position if rank.gpu is None else rank.gpu
    if 0 < count <= index:  # without any, torch says why
        raise ResourceError(
            f"rank {rank.rank} on {rank.node} has no GPU: CUDA shows {count} GPUs to {rank.local_world_size} ranks "
            f"(CUDA_VISIBLE_DEVICES: {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}). "
            "Start at most one rank per GPU, or show each rank only its own GPU (srun: --gpus-per-task=1)."
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def forget_memory(device: torch.device) -> None:
    """Free what earlier trials of this process have left on the GPUs, and start counting peak memory anew."""
    if device.type == "cuda":
        gc.collect()  # reference cycles of DDP hold the model
        torch.cuda.empty_cache()
        for index in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(index)


def uuid_of(device: int) -> str:
    """Return the UUID of a GPU as the driver's management library (NVML) names it."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def check_own_gpu(device: torch.device, *, rank: Rank, store: Store) -> None:
    """Check before NCCL does, whose error names no rank, that no ranks share a GPU. Collective.

    Raises:
        ResourceError: ranks of a node have the same GPU; raised on all ranks.
    """
    if device.type == "cpu":
        return
    store.set(f"gpu/{rank.rank}", f"{rank.node}: {uuid_of(device.index)}")  # containers of a machine are nodes to NCCL
    ranks: dict[str, list[str]] = {}
    for number, value in enumerate(store.multi_get([f"gpu/{each}" for each in range(rank.world_size)])):
        ranks.setdefault(value.decode(), []).append(str(number))
    for place, sharing in ranks.items():
        if len(sharing) > 1:
            raise ResourceError(
                f"{place}: ranks {', '.join(sharing)} have the same GPU. Start at most one rank per GPU, or show each "
                "rank only its own GPU (srun: --gpus-per-task=1)."
            )

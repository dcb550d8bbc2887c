"""GPUs of ranks: their UUIDs, and the check that each rank has its own."""

import torch
from torch._C._distributed_c10d import Store

from pipeline.errors import ResourceError
from pipeline.protocol.rank import Rank


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

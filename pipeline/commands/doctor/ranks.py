"""One rank of the all-reduce measurement.

Sent to nodes that may lack this package, so it imports only the standard library and torch.
"""

import json
import os
import socket
import sys
import time
from contextlib import closing
from datetime import timedelta
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_SIZES = tuple(4096 * 4**i for i in range(7))  # bytes: 4 KiB to 16 MiB
_SECONDS_PER_SIZE = 0.25
_MOST_ROUNDS, _FEWEST_ROUNDS = 15, 3
_TOO_SLOW_S = 0.6  # on such a slow link, larger sizes add no information


def free_port() -> int:
    """Return a free TCP port for the rendezvous at rank 0."""
    with closing(socket.socket()) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def measure(
    rank: int, *, world_size: int, init_method: str, interface: str | None, backend: str, timeout_s: float
) -> str:
    """Measure all-reduces of several sizes; every rank must call it.

    Args:
        rank: the rank of this process.
        world_size: number of ranks.
        init_method: rendezvous, as in ``torch.distributed.init_process_group``.
        interface: name of this node's network interface; one that the environment names takes precedence.
        backend: gloo or nccl.
        timeout_s: seconds to wait for the other ranks.

    Returns:
        JSON ``[[bytes, ms], ...]``: for each size the median over rounds of the slowest rank's time.
    """
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # without "=" it is a prefix
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, init_method=init_method, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
    )
    measured: list[tuple[int, float]] = []
    try:
        for size in _SIZES:
            _exchange(size, device=device)  # warm-up: connections and buffers
            (about,) = _slowest([_exchange(size, device=device)], device=device)
            rounds = max(_FEWEST_ROUNDS, min(_MOST_ROUNDS, int(_SECONDS_PER_SIZE / about)))
            times = _slowest([_exchange(size, device=device) for _ in range(rounds)], device=device)
            measured.append((size, 1e3 * median(times)))
            if about > _TOO_SLOW_S and len(measured) >= 3:
                break
    finally:
        dist.destroy_process_group()
    return json.dumps(measured)


def _exchange(size: int, *, device: "torch.device") -> float:
    """Return the seconds of an all-reduce of ``size`` bytes on this rank. Collective."""
    import torch
    import torch.distributed as dist

    tensor = torch.zeros(size // 4, device=device)
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(tensor)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _slowest(seconds: list[float], *, device: "torch.device") -> list[float]:
    """Return the longest of all ranks' times, element by element. Collective."""
    import torch
    import torch.distributed as dist

    times = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return list(map(float, times))


if __name__ == "__main__":
    print(measure(int(sys.argv[1]), **json.loads(sys.argv[2])))  # noqa: T201 - this is how it answers

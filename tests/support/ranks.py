"""Functions that several ranks run: real processes, which meet over gloo."""

import gc
import multiprocessing
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing

from pipeline.protocol.trial import Rank

# What takes seconds to import, once for all ranks of all tests; toys have a metric.
multiprocessing.set_forkserver_preload(
    ["pipeline.worker.main", "pipeline.strategies.fsdp", "torch._dynamo", "torchmetrics", "pytest", "hypothesis"]
)


def on_ranks(
    function: Callable[..., None], *arguments: Any, folder: Path, world_size: int = 2, timeout_s: float = 300
) -> None:
    """Call ``function(rank, *arguments)`` on each rank, with one thread; raises what one of them raises.

    Args:
        function: of a module's own names, as processes are told it by name.
        arguments: what it gets besides its `Rank`.
        folder: where the ranks meet; one meeting each.
        world_size: how many ranks.
        timeout_s: how long a rank waits for another one.
    """
    sys.audit("tests.ranks")
    torch.multiprocessing.start_processes(
        _be_rank,
        args=(world_size, folder, timeout_s, function, arguments),
        nprocs=world_size,
        start_method="forkserver",
    )


def _be_rank(
    rank: int,
    world_size: int,
    folder: Path,
    timeout_s: float,
    function: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # the fork server's imports: each collection would look through them and copy their pages
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    function(Rank(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size), *arguments)
    dist.destroy_process_group()

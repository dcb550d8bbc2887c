"""What a rank finds out when a peer is gone or late, in each place where ranks exchange something."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pipeline.train.errors import origin

Group = dist.ProcessGroup
Use = Callable[[], object]


def _ddp(group: Group, *, normed: bool = False, hook: str = "", unused: bool = False) -> DistributedDataParallel:
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4)] if normed else [nn.Linear(4, 4)]
    wrapped = DistributedDataParallel(nn.Sequential(*layers), process_group=group, find_unused_parameters=unused)
    if hook == "fp16":
        wrapped.register_comm_hook(group, fp16_compress_hook)
    for _ in range(3):
        _loss(wrapped).backward()
    return wrapped


def _sharded(group: Group) -> nn.Module:
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    _loss(model).backward()
    return model


def _loss(model: nn.Module) -> torch.Tensor:
    outputs: torch.Tensor = model(torch.randn(3, 4))
    return outputs.square().sum()


def _of(prepare: Callable[[Group], nn.Module], *, backward: bool = False) -> Callable[[Group], Use]:
    """The forward pass of a model, or its backward pass: C++ code sends gradients, with no frame of Python."""

    def prepared(group: Group) -> Use:
        model = prepare(group)
        if not backward:
            return lambda: _loss(model)
        loss = _loss(model)
        return lambda: (loss.backward(), model)  # which exchanges nothing once it is collected

    return prepared


USES: dict[str, Callable[[Group], Use]] = {
    "all_reduce": lambda group: lambda: dist.all_reduce(torch.ones(2), group=group),
    # In user code, where no frame is torch's.
    "waited for": lambda group: lambda: dist.all_reduce(torch.ones(2), group=group, async_op=True).wait(),
    "objects": lambda group: lambda: dist.all_gather_object([None, None], {}, group=group),
    "barrier": lambda group: lambda: dist.barrier(group=group),
    "forward of ddp": _of(lambda group: _ddp(group, normed=True)),  # rank 0's buffers are sent
    "backward of ddp": _of(_ddp, backward=True),
    "backward with unused parameters": _of(lambda group: _ddp(group, unused=True), backward=True),
    "backward with fp16": _of(lambda group: _ddp(group, hook="fp16"), backward=True),
    "forward of fsdp": _of(_sharded),
    "backward of fsdp": _of(_sharded, backward=True),
}
LATE = timedelta(seconds=3)
"""Long enough for what both ranks do before, on a busy machine; all pairs wait at the same time."""


def _pairs(_: int, folder: Path) -> None:
    """Two ranks for each use, forked where everything is imported and no thread runs yet."""
    processes = multiprocessing.get_context("fork")
    pairs = [
        processes.Process(target=_pair, args=(rank, name, prepare, folder, number))
        for number, (name, prepare) in enumerate(USES.items())
        for rank in range(2)
    ]
    for process in pairs:
        process.start()
    for process in pairs:
        process.join()


def _pair(rank: int, name: str, prepare: Callable[[Group], Use], folder: Path, number: int) -> None:
    """Rank 1 doesn't come to the first use, and ends before the second one."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{number}", rank=rank, world_size=2)
    for state in ("late", "gone"):
        group = dist.new_group(timeout=LATE if state == "late" else None)
        assert group is not None
        use = prepare(group)
        dist.barrier()
        if rank == 0:
            (folder / f"{name}, {state}").write_text(_origin(use))
        elif state == "gone":
            os.kill(os.getpid(), signal.SIGKILL)
        if state == "late":
            dist.barrier()
    os._exit(0)


def _origin(use: Use) -> Any:
    try:
        use()
    except Exception as error:  # noqa: BLE001 (whatever torch raises)
        return origin(error)
    return "nothing was raised"


@pytest.fixture(scope="module")
def origins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("uses")
    torch.multiprocessing.start_processes(_pairs, args=(folder,), nprocs=1, start_method="forkserver")
    return {path.name: path.read_text() for path in folder.glob("*, *")}


@pytest.mark.parametrize("name", USES)
def test_a_lost_or_late_peer_is_known_wherever_ranks_exchange_something(origins: dict[str, str], name: str) -> None:
    assert (origins[f"{name}, gone"], origins[f"{name}, late"]) == ("lost_peer", "peer_timeout")

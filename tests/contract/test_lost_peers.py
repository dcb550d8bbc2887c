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

from pipeline.training.ranks.torch_errors import origin

Group = dist.ProcessGroup
Use = Callable[[], object]


def _all_reduce(group: Group) -> Use:
    return lambda: dist.all_reduce(torch.ones(2), group=group)


def _waited_for(group: Group) -> Use:
    """In user code, where no frame is torch's."""
    return lambda: dist.all_reduce(torch.ones(2), group=group, async_op=True).wait()


def _objects(group: Group) -> Use:
    return lambda: dist.all_gather_object([None, None], {}, group=group)


def _barrier(group: Group) -> Use:
    return lambda: dist.barrier(group=group)


def _ddp(group: Group, *, normed: bool = False, hook: str = "", unused: bool = False) -> DistributedDataParallel:
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4)] if normed else [nn.Linear(4, 4)]
    wrapped = DistributedDataParallel(nn.Sequential(*layers), process_group=group, find_unused_parameters=unused)
    if hook == "fp16":
        wrapped.register_comm_hook(group, fp16_compress_hook)
    for _ in range(3):
        _loss(wrapped).backward()
    return wrapped


def _loss(model: nn.Module) -> torch.Tensor:
    outputs: torch.Tensor = model(torch.randn(3, 4))
    return outputs.square().sum()


def _forward(group: Group) -> Use:
    """Rank 0's buffers are sent."""
    wrapped = _ddp(group, normed=True)
    return lambda: wrapped(torch.randn(3, 4))


def _backward(**options: Any) -> Callable[[Group], Use]:
    """Gradients are sent by torch's C++ code, with no frame of Python."""

    def prepare(group: Group) -> Use:
        wrapped = _ddp(group, **options)
        loss = _loss(wrapped)
        return lambda: (loss.backward(), wrapped)  # which exchanges nothing once it is collected

    return prepare


def _sharded(group: Group) -> nn.Module:
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    _loss(model).backward()
    return model


def _sharded_forward(group: Group) -> Use:
    model = _sharded(group)
    return lambda: _loss(model)


USES: dict[str, Callable[[Group], Use]] = {
    "all_reduce": _all_reduce,
    "waited for": _waited_for,
    "objects": _objects,
    "barrier": _barrier,
    "forward of ddp": _forward,
    "backward of ddp": _backward(),
    "backward with unused parameters": _backward(unused=True),
    "backward with fp16": _backward(hook="fp16"),
    "forward of fsdp": _sharded_forward,
    "backward of fsdp": lambda group: _loss(_sharded(group)).backward,
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


def _origin(use: Use) -> str:
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
def test_a_peer_that_is_gone_is_known_wherever_ranks_exchange_something(origins: dict[str, str], name: str) -> None:
    assert origins[f"{name}, gone"] == "lost_peer"


@pytest.mark.parametrize("name", USES)
def test_a_peer_that_is_late_is_known_wherever_ranks_exchange_something(origins: dict[str, str], name: str) -> None:
    assert origins[f"{name}, late"] == "peer_timeout"

"""What two ranks save and resume: sharded parameters, one copy for each node."""

# promise: resumed after any step, with each strategy, optimizer, scheduler; with a different number of workers

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_trainings import Written, events_of, lab_trial, saved_in, train_rank
from ranks import on_ranks
from torch import Tensor

from pipeline.protocol.events import (
    CheckpointSaved,
)
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import Trial
from pipeline.training.build import build
from pipeline.training.checkpoints import files
from pipeline.training.checkpoints import storage as storage_module
from pipeline.training.checkpoints.manager import CheckpointManager
from pipeline.training.checkpoints.manifest import entries, folder_name, verify
from pipeline.training.checkpoints.state import restore
from pipeline.training.checkpoints.storage import Storage
from pipeline.training.context import TrainContext
from pipeline.training.meters.clock import Clock
from pipeline.training.meters.meter import Meter
from pipeline.training.ranks import collectives
from pipeline.training.step import train_step


@pytest.fixture(scope="module")
def root(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Several trainings in two processes: starting them takes most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        patch.syspath_prepend(project)
        folder = tmp_path_factory.mktemp("resume")
        on_ranks(_in_two_processes, folder, folder=folder)
        yield folder


def _in_two_processes(where: Rank, folder: Path) -> None:
    train_rank(_trial(folder, "two", precision="fp64"), where)
    _shard(folder / "sharded", where)


_OVERRIDES = [
    "checkpoint.every_steps=1", "checkpoint.keep=100", "optimizer._target_=torch.optim.AdamW", "parallel.strategy=ddp",

]  # fmt: skip


def _trial(folder: Path, name: str, *, precision: str, stopped: str = "", after: int = 0) -> Trial:
    """A trial with a checkpoint of each step; it goes on from what another one has left if that is given."""
    overrides = [*_OVERRIDES, f"train.precision={precision}"]
    return saved_in(folder, lab_trial(overrides, strategy="ddp", name=name), stopped=stopped, steps=after)


def test_only_the_first_rank_speaks_of_checkpoints(root: Path) -> None:
    assert [path.name for path in root.glob("*.1.jsonl")] == []
    assert [event.step for event in events_of(root, "two", CheckpointSaved)] == list(range(1, 9))


def _sharded(trial: Trial, rank: Rank) -> TrainContext:
    from torch.distributed.fsdp import fully_shard

    context = build(trial.model_copy(update={"strategy": "single"}), rank=rank)
    fully_shard(context.model)
    context.built = context.built._replace(optimizer=torch.optim.AdamW(context.model.parameters(), lr=0.1))
    return context


def _manager(context: TrainContext, outbox: Written) -> CheckpointManager:
    clock = Clock(device=context.device, warmup_steps=0)
    meter = Meter(context=context, clock=clock, outbox=outbox)
    clock.resume()
    clock.count(clock.lap(steps=1, samples=1))
    return CheckpointManager(context, meter=meter, outbox=outbox)


def _shard(folder: Path, rank: Rank) -> None:
    """Save in two processes with sharded parameters, and go on from that in two others."""
    trial = _trial(folder.parent, folder.name, precision="fp64")
    outbox = Written(f"{folder}.{rank.rank}")
    context = _sharded(trial, rank)
    with _manager(context, outbox) as manager:
        train_step(context, context.batches.training(0), step=0)
        manager.save(step=1)
        again = _sharded(trial.model_copy(update={"resume": True}), rank)
    with pytest.MonkeyPatch.context() as patch:
        fetched = _fetch_slowly(patch, rank)
        with _manager(again, outbox) as manager:
            assert manager.resume() == 1
    assert len(fetched) == (2 if rank.is_first else 0)  # to verify it, and for both ranks of the node
    assert not any(folder.exists() for folder in fetched)
    whole = _full(context)
    for one, other in zip(whole, _full(again), strict=True):
        assert torch.equal(one, other)
    if rank.is_first:
        torch.save(whole, f"{folder}.pt")
    dist.barrier()


def _fetch_slowly(patch: pytest.MonkeyPatch, rank: Rank) -> list[Path]:
    """Copy checkpoints as from an object storage, until the other rank has asked the store whether a copy is done."""
    store, fetched, real = dist.distributed_c10d._get_default_store(), [], Storage.fetched

    @contextmanager
    def fetch(storage: Storage, name: str) -> Iterator[Path]:
        with real(storage, name) as folder:
            fetched.append(folder)
            asked, until = store.add("asked", 0), time.monotonic() + 20
            while store.add("asked", 0) == asked:
                assert time.monotonic() < until, "the other rank waits in a collective, which would time out"
            yield folder

    patch.setattr(Storage, "fetched", fetch)
    patch.setattr(storage_module, "LocalFileSystem", type(None))
    if not rank.is_first:
        patch.setattr(collectives, "mark", lambda _: store.add("asked", 1))
    return fetched


def _full(context: TrainContext) -> list[Tensor]:
    tensors = [*context.model.state_dict().values()]
    tensors += [value for state in context.optimizer.state_dict()["state"].values() for value in state.values()]
    return [tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for tensor in tensors]


def test_sharded_parameters_are_saved_in_parts(root: Path) -> None:
    (entry,) = entries(Storage(str(root / "sharded")))

    assert entry.manifest is not None
    assert verify(Storage(str(root / "sharded")), entry) is None
    assert sum(file.name.startswith("shard-") for file in entry.manifest.files) == 2


def test_sharded_parameters_go_on_in_one_process(root: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    trial = _trial(root, "sharded", precision="fp64").model_copy(update={"strategy": "single"})
    context = build(trial, rank=Rank())
    restore(context, files.read(context, root / "sharded" / folder_name(1)))

    for one, other in zip(_full(context), torch.load(f"{root}/sharded.pt"), strict=True):
        assert torch.equal(one, other)


def test_a_storage_that_is_unknown_is_told_before_training(command: Callable[..., Any]) -> None:
    ended = command("run", "lab.yaml", "checkpoint.directory=s4://bucket/x")

    assert ended.code == 2
    assert "checkpoint.directory: s4://bucket/x: Protocol not known: s4" in ended.stderr

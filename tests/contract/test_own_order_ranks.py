"""Orders of one's own and a batch by worker: the same training at 1, 2 and 4 workers, also resumed within an epoch."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import samples
import toys
from ranks import on_ranks

from pipeline.errors import ExperimentError
from pipeline.protocol.trial import Rank
from pipeline.training import loop
from pipeline.training.checkpoints.manifest import folder_name
from pipeline.training.loop import train

WORKERS = (2, 4)
STOPPED = 3
"""Step within the first epoch of each case, after which it is resumed."""
CASES: dict[str, dict[str, Any]] = {
    "balanced": {
        "model": {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 3},
        "data": {"_target_": "toy_orders.imbalanced"},
        "loss": {"_target_": "torch.nn.CrossEntropyLoss"},
        "order": {"weights": "balanced"},
    },
    "length": {
        "model": {"_target_": "torch.nn.Linear", "in_features": 30, "out_features": 1},
        "data": {"_target_": "toy_orders.ragged"},
        "loader": {"collate": {"_target_": "toy_orders.padded"}},
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 1e-3},
        "order": {"bucket_by": "length"},
    },
    "function": {
        "order": {"_target_": "toy_orders.twice"},
        "train": {"global_batch_size": None, "batch_size_per_worker": 2},
        "parallel": {"strategy": "ddp", "launcher": "torchrun", "workers": 4},
    },
}


def _train(rank: Rank, folder: Path, case: str, *, resume: bool = False) -> list[float]:
    loop.probe = lambda context, **_: samples.parts(step_ms=5.0)
    trial = toys.trial(**CASES[case], checkpoint={"every_steps": STOPPED, "keep": 100}).model_copy(
        update={
            "strategy": "single" if rank.world_size == 1 else "ddp",
            "workers": rank.world_size,
            "checkpoints": str(folder / "checkpoints"),
            "resume": resume,
        }
    )
    kept = toys.Kept()
    train(trial, rank=rank, outbox=kept)
    return [point.value for point in kept.points("train/loss") if point.step > (STOPPED if resume else 0)]


def _all(rank: Rank, folder: Path) -> None:
    found = {}
    for case in CASES:
        whole = _train(rank, folder / case / "whole", case)
        found[case] = whole, _train(rank, folder / case / "resumed", case, resume=True)
    if rank.world_size == 2:
        try:
            loop.build(toys.trial(order={"_target_": "toy_orders.of_the_process"}), rank=rank)
        except ExperimentError as error:
            found["refused"] = str(error)
    (folder / f"{rank.rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Losses of one process, and of several from the beginning and from a checkpoint of the one."""
    root, probe = tmp_path_factory.mktemp("orders"), loop.probe
    reached: dict[str, Any] = {case: _train(Rank(), root / "1" / case, case) for case in CASES}
    loop.probe = probe
    for workers in WORKERS:
        folder = root / str(workers)
        for case in CASES:
            name = folder_name(STOPPED)
            shutil.copytree(root / "1" / case / "checkpoints" / name, folder / case / "resumed" / "checkpoints" / name)
        on_ranks(_all, folder, folder=folder, world_size=workers)
        reached[str(workers)] = json.loads((folder / "0.json").read_text())
    return reached


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("workers", WORKERS)
def test_any_number_of_workers_reaches_the_losses_of_one(found: dict[str, Any], workers: int, case: str) -> None:
    whole, resumed = found[str(workers)][case]
    assert len(whole) == len(found[case]) > 2 * STOPPED
    assert whole == pytest.approx(found[case], rel=1e-12)
    assert resumed == pytest.approx(found[case][STOPPED:], rel=1e-12)


def test_an_order_that_differs_between_ranks_is_refused(found: dict[str, Any]) -> None:
    assert found["2"]["refused"].startswith("order: differs between rank 0 and rank 1, which would train on other sam")

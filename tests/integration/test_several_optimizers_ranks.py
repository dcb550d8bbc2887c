"""Several optimizers: the same training at 1, 2 and 4 workers, also resumed within an epoch."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import samples
import toy_gans
import toys
from ranks import on_ranks

from pipeline.protocol.trial import Rank
from pipeline.training import loop
from pipeline.training.checkpoints.manifest import folder_name
from pipeline.training.loop import train

WORKERS = (2, 4)
STOPPED = 4
"""Step within the second epoch, after which the training is resumed."""
NAMES = ("train/loss", "train/loss_critic", "train/loss_generator", "train/score", "validation/loss_generator")
CASES: dict[str, dict[str, Any]] = {
    "clipped": {"train": {"clip_grad_norm": 0.05}},
    "accumulated": {"train": {"gradient_accumulation": 2}},
}


def _train(rank: Rank, folder: Path, case: str, *, resume: bool = False) -> dict[str, list[float]]:
    loop.probe = lambda context, **_: samples.parts(step_ms=5.0)
    trial = toys.trial(**{**toy_gans.SECTIONS, **CASES[case]}, checkpoint={"every_steps": STOPPED, "keep": 100})
    trial = trial.model_copy(
        update={
            "strategy": "single" if rank.world_size == 1 else "ddp",
            "workers": rank.world_size,
            "allowed": (*trial.allowed, "toy_gans"),
            "checkpoints": str(folder / "checkpoints"),
            "resume": resume,
        }
    )
    kept = toys.Kept()
    train(trial, rank=rank, outbox=kept)
    return {name: [one.value for one in kept.points(name) if one.step > (STOPPED if resume else 0)] for name in NAMES}


def _all(rank: Rank, folder: Path) -> None:
    found = {}
    for case in CASES:
        whole = _train(rank, folder / case / "whole", case)
        found[case] = whole, _train(rank, folder / case / "resumed", case, resume=True)
    (folder / f"{rank.rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Losses of one process, and of several from the beginning and from a checkpoint of the one."""
    root, probe = tmp_path_factory.mktemp("optimizers"), loop.probe
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
    one = found[case]
    assert len(one["train/loss"]) == 6
    assert one["train/loss"][0] != one["train/loss"][-1]
    for name in NAMES:
        assert whole[name] == pytest.approx(one[name], rel=1e-12)
        assert resumed[name] == pytest.approx(one[name][-len(resumed[name]) :], rel=1e-12)
    assert len(resumed["train/loss"]) == 6 - STOPPED

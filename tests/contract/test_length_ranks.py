"""Last step of a training: the same with any number of workers, also resumed with another number."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import samples
import toys
from ranks import on_ranks

from pipeline.protocol.trial import Rank
from pipeline.training import loop
from pipeline.training.checkpoints.manifest import folder_name
from pipeline.training.loop import train

WORKERS = (2, 4)
LAST_KEPT = 7
LENGTH: dict[str, Any] = {
    "train": {"epochs": 20, "evaluate_every_steps": 2, "early_stopping": {"patience": 3, "min_delta": 0.02}},
    "checkpoint": {"every_steps": 1, "keep": 100},
}


def _train(rank: Rank, folder: Path, *, resume: bool = False) -> None:
    loop.probe = lambda context, **_: samples.parts(step_ms=5.0)
    trial = toys.trial(**LENGTH).model_copy(
        update={
            "strategy": "single" if rank.world_size == 1 else "ddp",
            "workers": rank.world_size,
            "checkpoints": str(folder / "checkpoints"),
            "resume": resume,
        }
    )
    kept = toys.Kept()
    result = train(trial, rank=rank, outbox=kept)
    found = {
        "steps": result.steps,
        "stopped_early": result.stopped_early,
        "validation": [(point.step, point.value) for point in kept.points("validation/loss")],
    }
    (folder / f"{rank.rank}.json").write_text(json.dumps(found))


def _both(rank: Rank, folder: Path) -> None:
    for name in ("whole", "resumed"):
        _train(rank, folder / name, resume=name == "resumed")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of one process, and of several from the beginning and from a checkpoint of the one."""
    root = tmp_path_factory.mktemp("length")
    alone = root / "1"
    alone.mkdir()
    probe = loop.probe
    _train(Rank(), alone)
    loop.probe = probe
    reached = {"1": json.loads((alone / "0.json").read_text())}
    for workers in WORKERS:
        folder = root / str(workers)
        for name in map(folder_name, range(1, LAST_KEPT + 1)):
            shutil.copytree(alone / "checkpoints" / name, folder / "resumed" / "checkpoints" / name)
        (folder / "whole").mkdir()
        on_ranks(_both, folder, folder=folder, world_size=workers)
        for name in ("whole", "resumed"):
            for rank in range(workers):
                reached[f"{workers} {name} {rank}"] = json.loads((folder / name / f"{rank}.json").read_text())
    return reached


@pytest.mark.parametrize("name", ["whole", "resumed"])
@pytest.mark.parametrize("workers", WORKERS)
def test_all_ranks_end_at_the_step_of_one_process(found: dict[str, Any], workers: int, name: str) -> None:
    alone = found["1"]
    assert LAST_KEPT < alone["steps"] < 60
    assert alone["stopped_early"].startswith("validation/loss has not improved from")
    for rank in range(workers):
        own = found[f"{workers} {name} {rank}"]
        assert own["steps"] == alone["steps"]
        assert own["stopped_early"] == alone["stopped_early"]
    first = found[f"{workers} {name} 0"]
    assert [step for step, _ in first["validation"]] == [step for step, _ in alone["validation"]]
    for (_, value), (_, expected) in zip(first["validation"], alone["validation"], strict=True):
        assert value == pytest.approx(expected, rel=1e-12)

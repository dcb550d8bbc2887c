"""Losses over the whole global batch: the same training at 1, 2 and 4 workers, and resumed within an epoch."""

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

STOPPED = 4
"""A step within the second epoch of 3 steps, whose last batches have 2 samples for up to 4 workers."""
TASKS = ("Similar", "Both")
SERIES = ("train/loss", "validation/loss", "train/rows", "validation/rows", "train/gradient_norm")


def _trained(rank: Rank, folder: Path, task: str, *, strategy: str, resume: bool = False) -> dict[str, Any]:
    loop.probe = lambda context, **_: samples.parts(step_ms=5.0)
    trial = toys.trial(
        model={"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 4},
        data={"_target_": "toy_contrastive.pairs"},
        loss=None,
        task={"_target_": f"toy_contrastive.{task}"},
        train={"clip_grad_norm": 0.5},
        checkpoint={"every_steps": STOPPED, "keep": 100},
    )
    own = {"strategy": strategy, "workers": rank.world_size, "checkpoints": str(folder), "resume": resume}
    allowed = (*trial.allowed, "toy_contrastive")
    kept = toys.Kept()
    train(trial.model_copy(update={**own, "allowed": allowed}), rank=rank, outbox=kept)
    assert ("resumed" in kept.kinds()) == (resume and rank.is_first)
    first = STOPPED if resume else 0
    return {name: {one.step: one.value for one in kept.points(name) if one.step > first} for name in SERIES}


def _as_one(rank: Rank, root: Path, expected: dict[str, Any], strategies: tuple[str, ...]) -> None:
    for task, wanted in expected.items():
        for strategy in strategies:
            resumes = strategy == strategies[0]
            folder = root / ("resumed" if resumes else f"{strategy}-new") / task
            found = _trained(rank, folder, task, strategy=strategy, resume=resumes)
            for name, series in found.items() if rank.is_first else ():
                steps = [step for step in wanted[name] if step > (STOPPED if resumes else 0)]
                assert series == pytest.approx({step: wanted[name][step] for step in steps}, abs=1e-12), (task, name)
    if rank.is_first:  # as a baseline that rank 0 trains beside the training of all
        assert _trained(Rank(), root / "baseline", TASKS[0], strategy="single") == expected[TASKS[0]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Series of one process, and a folder with its checkpoints within an epoch."""
    root, probe = tmp_path_factory.mktemp("gathered"), loop.probe
    reached = {task: _trained(Rank(), root / "alone" / task, task, strategy="single") for task in TASKS}
    loop.probe = probe
    assert all(reached[TASKS[0]][name] for name in SERIES)
    for task in TASKS:
        shutil.copytree(root / "alone" / task / folder_name(STOPPED), root / "resumed" / task / folder_name(STOPPED))
    return root, reached


@pytest.mark.parametrize(("world_size", "strategies"), [(2, ("ddp", "fsdp")), (4, ("ddp", "ddp"))])
def test_it_trains_as_one_process_and_resumes(
    alone: tuple[Path, dict[str, Any]], tmp_path: Path, world_size: int, strategies: tuple[str, ...]
) -> None:
    root, expected = alone
    shutil.copytree(root, tmp_path / "copy")
    on_ranks(_as_one, tmp_path / "copy", expected, strategies, folder=tmp_path, world_size=world_size)

"""Mean average precision of the docs' detector: over ranks it is that of one process.

torchmetrics computes it with torchvision and pycocotools, which nothing else here needs: pip install them to run this.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import samples
import toys
from blocks import blocks
from ranks import on_ranks

from pipeline.protocol.trial import Rank
from pipeline.training import loop
from pipeline.training.loop import train

pytest.importorskip("torchvision")
pytest.importorskip("pycocotools")

ROOT = Path(__file__).parents[2]
EPOCHS = 12


def _trained(rank: Rank) -> dict[str, list[float]]:
    loop.probe = lambda context, **_: samples.parts(step_ms=5.0)
    trial = toys.trial(
        model={"_target_": "mine.shapes.Detector"},
        data={"_target_": "mine.shapes.shapes", "samples": 128},
        loader={"collate": {"_target_": "mine.shapes.Collate"}},
        loss=None,
        task={"_target_": "pipeline.tasks.loss_terms.LossTerms", "weights": {"boxes": 5.0}},
        metrics={"detection": {"_target_": "torchmetrics.detection.MeanAveragePrecision"}},
        optimizer={"_target_": "torch.optim.AdamW", "lr": 0.01},
        train={"epochs": EPOCHS, "global_batch_size": 16},
    )
    strategy = "ddp" if rank.world_size > 1 else "single"
    update = {"allowed": (*trial.allowed, "mine"), "strategy": strategy, "workers": rank.world_size}
    kept = toys.Kept()
    train(trial.model_copy(update=update), rank=rank, outbox=kept)
    return {
        name: kept.series(name) for name in ("train/loss", "validation/loss", "validation/map_50", "validation/map")
    }


def _as_one(rank: Rank, folder: str, expected: dict[str, list[float]]) -> None:
    sys.path.insert(0, folder)
    found: dict[str, Any] = _trained(rank)
    for name, values in expected.items() if rank.is_first else ():
        # Adam amplifies the rounding of sums in another order; metrics are in fp32.
        assert found[name] == pytest.approx(values, rel=1e-6), name


def test_the_mean_average_precision_of_two_workers_is_that_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = (block for block in blocks(ROOT / "docs" / "detection.md", root=ROOT) if block.title == "mine/shapes.py")
    (tmp_path / "mine").mkdir()
    (tmp_path / block.title).write_text(block.text + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(loop, "probe", loop.probe)
    expected = _trained(Rank())
    sys.modules.pop("mine.shapes")
    assert expected["validation/map_50"][-1] > 0.2 > expected["validation/map_50"][0]
    on_ranks(_as_one, str(tmp_path), expected, folder=tmp_path)

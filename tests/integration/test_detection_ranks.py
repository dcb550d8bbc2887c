"""Detection and segmentation train the same at 1 and 2 workers: the detector of examples/, and masks with gaps."""

# promise: detection and segmentation: terms of a loss, any number of boxes, at 1 and 2 workers

import sys
from pathlib import Path
from typing import Any

import pytest
import toys
from ranks import on_ranks

from pipeline.protocol.rank import Rank
from pipeline.train.run import train

PRECISION = "mean average precision"
PACKAGES = ("torchvision", "pycocotools")
"""Packages that torchmetrics needs for the mean average precision."""
FOLDER = Path(__file__).parents[2] / "examples" / "detection"
DETECTOR = {
    "model": {"_target_": "shapes.Detector", "width": 2},
    "data": {"_target_": "shapes.shapes", "samples": 22},
    "loader": {"collate": {"_target_": "shapes.Collate"}},
    "loss": None,
    "metrics": {"found": {"_target_": "toy_detection.Found"}},
}
CASES: dict[str, dict[str, Any]] = {
    "means over images": DETECTOR | {"task": {"_target_": "shapes.Terms", "weights": {"boxes": 5.0}}},
    "divided by boxes": DETECTOR
    | {
        "model": {"_target_": "toy_detection.by_boxes"},
        "data": {"_target_": "toy_detection.with_boxes"},
        "task": {"_target_": "toy_detection.terms_by_boxes"},
    },
    "segmentation": {
        "model": {"_target_": "torch.nn.Conv2d", "in_channels": 1, "out_channels": 3, "kernel_size": 3, "padding": 1},
        "data": {"_target_": "toy_detection.masks"},
        "loss": {"_target_": "torch.nn.CrossEntropyLoss", "ignore_index": 255},
        "metrics": {
            "iou": {
                "_target_": "torchmetrics.classification.MulticlassJaccardIndex",
                "num_classes": 3,
                "ignore_index": 255,
            }
        },
    },
    PRECISION: DETECTOR
    | {
        "model": {"_target_": "toy_detection.outlined"},
        "data": {"_target_": "shapes.shapes", "samples": 60},
        "task": {"_target_": "shapes.Terms"},
        "metrics": {"detection": {"_target_": "torchmetrics.detection.MeanAveragePrecision", "class_metrics": True}},
    },
}


def _trained(rank: Rank, case: dict[str, Any]) -> dict[str, list[float]]:
    trial = toys.trial(**case, train={"epochs": 2})
    allowed = (*trial.allowed, "shapes")
    strategy = "ddp" if rank.world_size > 1 else "single"
    update = {"allowed": allowed, "strategy": strategy, "workers": rank.world_size}
    kept = toys.Kept()
    train(trial.model_copy(update=update), rank=rank, outbox=kept)
    names = {point.name for event in kept.events if event.kind == "metrics" for point in event.points}
    return {name: kept.series(name) for name in sorted(names) if name.startswith(("train/", "validation/"))}


def _as_one(rank: Rank, folder: str, expected: dict[str, dict[str, list[float]]]) -> None:
    sys.path.insert(0, folder)
    for name, wanted in expected.items():
        found = _trained(rank, CASES[name])
        if rank.is_first:
            assert wanted.keys() <= found.keys()  # besides, how long gradients are exchanged
            for series, values in wanted.items():
                assert found[series] == pytest.approx(values, abs=1e-11, rel=1e-12), (name, series)


def _compared(cases: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, list[float]]]:
    """Return the series of one process by case, which are those of two workers."""
    monkeypatch.syspath_prepend(str(FOLDER))
    expected = {name: _trained(Rank(), CASES[name]) for name in cases}
    sys.modules.pop("shapes")
    on_ranks(_as_one, str(FOLDER), expected, folder=folder)
    return expected


def test_two_workers_train_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _compared([name for name in CASES if name != PRECISION], tmp_path, monkeypatch)
    detector = expected["means over images"]
    assert {"train/boxes", "train/objects", "validation/labels", "validation/found"} <= detector.keys()
    assert detector["train/loss"][0] == pytest.approx(
        detector["train/objects"][0] + 5 * detector["train/boxes"][0] + detector["train/labels"][0]
    )
    assert "validation/iou" in expected["segmentation"]


def test_the_mean_average_precision_of_two_workers_is_that_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in PACKAGES:
        pytest.importorskip(package)
    found = _compared([PRECISION], tmp_path, monkeypatch)[PRECISION]
    assert 0.01 < found["validation/map"][-1] < 1
    assert found["validation/map_per_class_0"] != found["validation/map_per_class_1"]

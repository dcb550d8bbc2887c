"""Detection and segmentation train the same at 1 and 2 workers: the detector of examples/, and masks with gaps."""

# promise: detection and segmentation: terms of a loss, any number of boxes, at 1 and 2 workers

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from ranks import Ranks
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset
from torchmetrics import Metric

from pipeline.protocol.trial import Rank
from pipeline.tasks import Loss

PRECISION = "mean average precision"
PACKAGES = ("torchvision", "pycocotools")  # Packages that torchmetrics needs for the mean average precision
FOLDER = Path(__file__).parents[3] / "examples" / "detection"
DETECTOR = {
    "model": {"_target_": "shapes.Detector", "width": 2},
    "data": {"_target_": "shapes.shapes", "samples": 22},
    "loader": {"collate": {"_target_": "shapes.Collate"}},
    "loss": None,
    "metrics": {"found": {"_target_": "test_detection_ranks.Found"}},
}
CASES: dict[str, dict[str, Any]] = {
    "means over images": DETECTOR | {"task": {"_target_": "shapes.Terms", "weights": {"boxes": 5.0}}},
    "divided by boxes": DETECTOR
    | {
        "model": {"_target_": "test_detection_ranks.by_boxes"},
        "data": {"_target_": "test_detection_ranks.with_boxes"},
        "task": {"_target_": "test_detection_ranks.terms_by_boxes"},
    },
    "segmentation": {
        "model": {"_target_": "torch.nn.Conv2d", "in_channels": 1, "out_channels": 3, "kernel_size": 3, "padding": 1},
        "data": {"_target_": "test_detection_ranks.masks"},
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
        "model": {"_target_": "test_detection_ranks.outlined"},
        "data": {"_target_": "shapes.shapes", "samples": 60},
        "task": {"_target_": "shapes.Terms"},
        "metrics": {"detection": {"_target_": "torchmetrics.detection.MeanAveragePrecision", "class_metrics": True}},
    },
}


def by_boxes() -> nn.Module:
    """The detector of examples/detection, with terms that are divided by the number of boxes."""
    from shapes import Detector  # type: ignore[import-not-found] # of examples/detection

    class ByBoxes(Detector):  # type: ignore[misc]
        def terms(self, cells: Tensor, targets: Any) -> dict[str, Tensor]:
            boxes = sum(len(target["boxes"]) for target in targets)
            return {name: value * len(cells) / boxes for name, value in super().terms(cells, targets).items()}

    return ByBoxes(width=2)


def terms_by_boxes() -> Any:
    """The task of examples/detection, whose terms are means over the boxes."""
    from shapes import Terms

    class ByBoxes(Terms):  # type: ignore[misc]
        def __call__(self, model: nn.Module, batch: Any) -> Loss:
            loss: Loss = super().__call__(model, batch)
            boxes = torch.tensor(sum(len(target["boxes"]) for target in batch[1]))
            return loss._replace(sum=loss.sum / len(batch[0]) * boxes, count=boxes)

    return ByBoxes()


def with_boxes() -> tuple[Subset[Any], ...]:
    """The images of examples/detection that have boxes: a worker's batch without any would count nowhere."""
    from shapes import shapes

    return tuple(Subset(one, [i for i in range(len(one)) if len(one[i][1]["boxes"])]) for one in shapes(samples=28))


def outlined() -> nn.Module:
    """The detector of examples/detection, which finds one box in each image: that around all that is bright."""
    from shapes import Detector

    class Outlined(Detector):  # type: ignore[misc]
        def forward(self, images: Tensor, targets: Any = None) -> Any:
            if targets is not None:
                return super().forward(images, targets)
            return [self.outline(image) for image in images]

        def outline(self, image: Tensor) -> dict[str, Tensor]:
            score = self.head(self.body(image[None]))[0, 0].mean() + image.mean()  # unequal, as ties have no order
            rows, columns = (image[0] > 0.6).nonzero().unbind(1)
            box = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1] if len(rows) else [0, 0, 1, 1]
            is_frame = image[0, (box[1] + box[3]) // 2, (box[0] + box[2]) // 2] < 0.6
            boxes = image.new_tensor([box])
            return {"boxes": boxes, "scores": score.sigmoid()[None], "labels": is_frame.long()[None]}

    return Outlined(width=2)


def masks() -> tuple[TensorDataset, TensorDataset]:
    """Images and masks of three classes, of which some pixels are unknown."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(33, 1, 6, 6, generator=generator)
    classes = (images[:, 0] > 0).long() + (images[:, 0] > 1).long()
    unknown = torch.rand(33, 6, 6, generator=generator) < torch.rand(33, 1, 1, generator=generator)
    classes = classes.masked_fill(unknown, 255)
    return TensorDataset(images[:22], classes[:22]), TensorDataset(images[22:], classes[22:])


class Found(Metric):
    """Boxes that were found per box that is there, with a list state of all images, as mean average precision has."""

    counts: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("counts", default=[], dist_reduce_fx=None)

    def update(self, outputs: list[Any], targets: list[Any]) -> None:
        for output, target in zip(outputs, targets, strict=True):
            self.counts.append(torch.tensor([len(output["boxes"]), len(target["boxes"])]))

    def compute(self) -> Tensor:
        found, there = torch.stack(self.counts).sum(0)
        return found / there


def _trained(rank: Rank, case: dict[str, Any]) -> dict[str, list[float]]:
    strategy = "ddp" if rank.world_size > 1 else "single"
    how = {"allowed": (*toys.ALLOWED, "shapes"), "strategy": strategy, "workers": rank.world_size}
    _, kept = toys.trained(rank=rank, **how, **case, train={"epochs": 2})
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


def _compared(cases: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, list[float]]]:
    """Return the series of one process by case, which are those of two workers."""
    monkeypatch.syspath_prepend(str(FOLDER))
    expected = {name: _trained(Rank(), CASES[name]) for name in cases}
    sys.modules.pop("shapes")
    with Ranks(2, timeout_s=300) as ranks:
        ranks.call(_as_one, str(FOLDER), expected)
    return expected


def test_two_workers_train_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _compared([name for name in CASES if name != PRECISION], monkeypatch)
    detector = expected["means over images"]
    assert {"train/boxes", "train/objects", "validation/labels", "validation/found"} <= detector.keys()
    assert detector["train/loss"][0] == pytest.approx(
        detector["train/objects"][0] + 5 * detector["train/boxes"][0] + detector["train/labels"][0]
    )
    assert "validation/iou" in expected["segmentation"]


def test_the_mean_average_precision_of_two_workers_is_that_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in PACKAGES:
        pytest.importorskip(package)
    found = _compared([PRECISION], monkeypatch)[PRECISION]
    assert 0.01 < found["validation/map"][-1] < 1
    assert found["validation/map_per_class_0"] != found["validation/map_per_class_1"]

"""Models and data of the tests of detection and segmentation, besides the detector of the docs."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset
from torchmetrics import Metric

from pipeline.tasks import Loss


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

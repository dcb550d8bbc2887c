"""Made pictures with up to four squares and frames, a small detector for them, and its task."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from pipeline.tasks import Loss

SIZE, STRIDE = 32, 4
Target = Mapping[str, Tensor]


class Shapes(Dataset[Any]):
    """Pairs of an image (1, 32, 32) and its boxes (n, 4) in pixels with labels (n,): 0 for squares, 1 for frames."""

    def __init__(self, samples: int, *, seed: int) -> None:
        self.samples, self.seed = samples, seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Target]:
        generator = torch.Generator().manual_seed(100_000 * self.seed + index)
        image = 0.1 * torch.randn(1, SIZE, SIZE, generator=generator)
        count = int(torch.randint(5, (), generator=generator))  # none at all in a fifth of the images
        labels = torch.randint(2, (count,), generator=generator)
        sizes = torch.randint(6, 11, (count, 1), generator=generator)
        corners = (torch.rand(count, 2, generator=generator) * (SIZE - sizes)).long()
        boxes = torch.cat([corners, corners + sizes], dim=1)
        for (left, top, right, bottom), label in zip(boxes.tolist(), labels.tolist(), strict=True):
            image[0, top:bottom, left:right] = 1
            if label:
                image[0, top + 2 : bottom - 2, left + 2 : right - 2] = 0
        return image, {"boxes": boxes.float(), "labels": labels}


def shapes(samples: int = 256) -> tuple[Shapes, Shapes]:
    return Shapes(samples, seed=0), Shapes(samples // 4, seed=1)


class Collate:
    """Stacks images; targets stay a list, since each image has another number of boxes."""

    def __call__(self, samples: list[tuple[Tensor, Target]]) -> tuple[Tensor, list[Target]]:
        images, targets = zip(*samples, strict=True)
        return torch.stack(images), list(targets)


class Detector(nn.Module):
    """Each cell of 4 x 4 pixels predicts whether a box has its center there, the box, and its label."""

    def __init__(self, *, classes: int = 2, width: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(2 * width, 2 * width, 5, padding=2), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Conv2d(2 * width, 5 + classes, 1)

    def forward(self, images: Tensor, targets: list[Target] | None = None) -> Any:
        cells = self.head(self.body(images)).permute(0, 2, 3, 1)  # (batch, rows, columns, 5 + classes)
        if self.training and targets is not None:
            return self.terms(cells, targets)
        return [self.predictions(image) for image in cells]

    def terms(self, cells: Tensor, targets: list[Target]) -> dict[str, Tensor]:
        """Means over the images of sums over their boxes."""
        sums = {"objects": cells.new_zeros(()), "boxes": cells.new_zeros(()), "labels": cells.new_zeros(())}
        for image, target in zip(cells, targets, strict=True):
            boxes, labels = target["boxes"], target["labels"]
            columns, rows = ((boxes[:, :2] + boxes[:, 2:]) / 2 / STRIDE).long().unbind(1)
            there = torch.zeros_like(image[..., 0])
            there[rows, columns] = 1
            found = image[rows, columns]
            sums["objects"] += functional.binary_cross_entropy_with_logits(image[..., 0], there, reduction="sum")
            sums["boxes"] += functional.l1_loss(found[:, 1:5], boxes / SIZE, reduction="sum")
            sums["labels"] += functional.cross_entropy(found[:, 5:], labels, reduction="sum")
        return {name: value / len(cells) for name, value in sums.items()}

    def predictions(self, image: Tensor) -> Target:
        scores = image[..., 0].sigmoid().flatten()
        found = image.flatten(0, 1)[scores > 0.3]
        return {"boxes": found[:, 1:5] * SIZE, "scores": scores[scores > 0.3], "labels": found[:, 5:].argmax(1)}


class Terms:
    """The sum of the terms that a detector computes, each of which is a log, too."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self.weights = weights or {}  # factors of terms in the sum; logs are without them

    def __call__(self, model: nn.Module, batch: tuple[Tensor, list[Target]]) -> Loss:
        images, targets = batch
        predictions = None if model.training else model(images)
        with computing_terms(model):
            terms = model(images, targets)
        loss = torch.stack([self.weights.get(name, 1.0) * term for name, term in terms.items()]).sum()
        return Loss(loss * len(images), None, predictions, targets, logs=terms)


@contextmanager
def computing_terms(model: nn.Module) -> Iterator[None]:
    """Put modules into training mode, in which a detector computes terms, but none that changes or draws."""
    keeps = nn.BatchNorm2d | nn.Dropout
    changed = [module for module in model.modules() if not (module.training or isinstance(module, keeps))]
    for module in changed:
        module.training = True
    yield
    for module in changed:
        module.training = False

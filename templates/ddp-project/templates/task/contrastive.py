"""The task: features of images without labels (SimCLR: Chen et al. 2020, arXiv 2002.05709).

Two random views of an image attract each other, and repel the views of all other images of the global batch.
"""

import math
from typing import Any

import torch
from pipeline.tasks import StepOutput, gathered
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat


class Views(Dataset[tuple[Tensor, ...]]):
    """Triples of two random views of an image and its label, of a dataset of images with labels."""

    def __init__(self, images: Any, *, rotation: float, shift: float, scale: float, noise: float) -> None:
        self.images = images
        self.noise = noise
        self.ranges = torch.tensor([math.radians(rotation), 2 * shift, 2 * shift, scale])  # an image is 2 wide and high

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        image, target = self.images[index]
        # Random numbers are seeded by sample and epoch, so the views are the same for any number of workers.
        angles, right, down, sizes = (self.ranges[:, None] * (2 * torch.rand(4, 2) - 1)).unbind()
        cosine, sine = (1 + sizes) * angles.cos(), (1 + sizes) * angles.sin()
        matrices = torch.stack([cosine, -sine, right, sine, cosine, down], dim=1).view(2, 2, 3)
        both = image.expand(2, *image.shape)
        grid = functional.affine_grid(matrices, list(both.shape), align_corners=False)
        views = functional.grid_sample(both, grid, padding_mode="border", align_corners=False)
        first, second = views + self.noise * torch.randn_like(views)
        return first, second, target


def two_views(
    of: tuple[Any, Any], *, rotation: float = 15.0, shift: float = 0.1, scale: float = 0.1, noise: float = 0.2
) -> tuple[Views, Views]:
    """Two random views of each training and validation image.

    Args:
        of: training and validation images, as `data.py` returns them.
        rotation: largest angle in degrees.
        shift: largest shift as part of the image.
        scale: largest change of size, as part of it.
        noise: standard deviation of the noise that is added.
    """
    train, validation = (Views(part, rotation=rotation, shift=shift, scale=scale, noise=noise) for part in of)
    return train, validation


class SimCLR(nn.Module):
    """An encoder of features, and a head of two layers whose output the loss compares."""

    def __init__(self, encoder: nn.Module, *, features: int, projection: int = 64) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.Linear(features, projection))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features (batch, features) and projections (batch, projection) of images."""
        features = self.encoder(images)
        return features, self.head(features)


class Contrastive:
    """NT-Xent, the loss of SimCLR, over the whole global batch; metrics get features of first views, and labels."""

    def __init__(self, *, temperature: float = 0.5) -> None:
        self.temperature = temperature

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> StepOutput:
        """Classify each view among all others by its cosine similarity; its class is the other view of its image."""
        first, second, targets = batch
        features, projections = model(torch.cat([first, second]))
        views = gathered(torch.stack(projections.chunk(2), dim=1))  # of all workers: (global batch, 2, projection)
        rows = functional.normalize(torch.cat(views.unbind(1)), dim=1)
        similarity = (rows @ rows.T / self.temperature).fill_diagonal_(-torch.inf)
        partners = torch.arange(len(rows), device=rows.device).roll(len(views))
        return StepOutput(functional.cross_entropy(similarity, partners), features[: len(first)], targets)


class LinearProbe(Metric):
    """Accuracy of a ridge regression on one-hot labels, in which each sample is predicted by all others.

    The prediction without a sample follows from the fit with it (Hastie, Tibshirani and Friedman 2009, The Elements of
    Statistical Learning, section 7.10).
    """

    higher_is_better = True
    full_state_update = False
    features: list[Tensor]
    targets: list[Tensor]

    def __init__(self, *, num_classes: int, penalty: float = 1.0) -> None:
        super().__init__()
        self.num_classes, self.penalty = num_classes, penalty
        self.add_state("features", default=[], dist_reduce_fx="cat")
        self.add_state("targets", default=[], dist_reduce_fx="cat")

    def update(self, features: Tensor, targets: Tensor) -> None:
        """Add features (batch, width) and labels (batch,)."""
        self.features.append(features.detach().double())
        self.targets.append(targets)

    def compute(self) -> Tensor:
        """Return the accuracy."""
        features, targets = dim_zero_cat(self.features), dim_zero_cat(self.targets)
        scaled = (features - features.mean(0)) / features.std(0).clamp(min=1e-9)
        inputs = torch.cat([scaled, scaled.new_ones(len(scaled), 1)], dim=1)
        penalties = torch.full_like(inputs[0], self.penalty)
        penalties[-1] = 1e-9  # the intercept
        wanted = functional.one_hot(targets, self.num_classes).to(inputs.dtype)
        solved = torch.linalg.solve(inputs.T @ inputs + penalties.diag(), inputs.T)
        leverage = (inputs * solved.T).sum(1, keepdim=True)
        left_out = wanted - (wanted - inputs @ (solved @ wanted)) / (1 - leverage).clamp(min=1e-9)
        accuracy: Tensor = (left_out.argmax(1) == targets).float().mean()
        return accuracy

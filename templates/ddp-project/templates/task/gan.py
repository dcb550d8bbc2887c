"""The task: a generator and a discriminator that train against each other (Goodfellow et al. 2014, arXiv 1406.2661).

Replace it with your own: a task yields a loss for each optimizer of `experiments/*.yaml`, and runs on after its update.
"""

from collections.abc import Iterator
from typing import Any

import torch
from pipeline.tasks import StepOutput
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset


class WithNoise(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of noise and image, of a dataset of images with labels. Each read draws other noise."""

    def __init__(self, images: Any, *, size: int) -> None:
        self.images = images
        self.size = size

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, _ = self.images[index]
        return torch.randn(self.size), image  # seeded by sample and epoch, so the same for any number of workers


def with_noise(of: tuple[Any, Any], *, size: int) -> tuple[WithNoise, WithNoise]:
    """Training and validation images with noise.

    Args:
        of: training and validation images, as `data.py` returns them.
        size: numbers of noise for each image.
    """
    train, validation = of
    return WithNoise(train, size=size), WithNoise(validation, size=size)


class GAN:
    """Losses of a discriminator, and of a generator that doesn't saturate, for batches of noise and images.

    Metrics get the discriminator's outputs for real and generated images, and 1 or 0 for each.
    """

    def __init__(self, *, noise: int, pictures: int = 64) -> None:
        self.noise = noise
        self._pictures = pictures

    def __call__(self, model: Any, batch: tuple[Tensor, Tensor]) -> Iterator[StepOutput]:
        """Yield the loss of the discriminator and, after its update, the loss of the generator."""
        noise, real = batch
        generated = model.generator(noise)
        logits = torch.cat([model.discriminator(real), model.discriminator(generated.detach())]).flatten()
        is_real = (torch.arange(len(logits), device=logits.device) < len(real)).to(logits.dtype)
        loss = functional.binary_cross_entropy_with_logits(logits, is_real)
        yield StepOutput(loss, logits, is_real.long(), optimizer="discriminator")
        fooled = model.discriminator(generated).flatten()
        yield StepOutput(functional.softplus(-fooled).mean(), fooled, None, optimizer="generator")

    def pictures(self, model: nn.Module) -> dict[str, Tensor]:
        """Generate images after an evaluation, of the same noise each time; values from 0 to 1."""
        noise = torch.randn(self._pictures, self.noise)  # on the CPU: equal on any device
        images: Tensor = model(noise.to(next(model.parameters())))
        return {"generated": (images + 1) / 2}

"""Convolutional generator and discriminator, after Radford et al. 2015 (DCGAN), arXiv 1511.06434.

Group normalization takes the place of batch normalization, whose statistics would be those of each worker's share.
"""

from torch import Tensor, nn
from typing_extensions import override

from pipeline.errors import ExperimentError

_GROUPS = 4
_SMALLEST = 4
"""Height and width from which the generator begins, and where the discriminator ends."""


class DCGAN(nn.Module):
    """A generator of images with values from -1 to 1, and a discriminator of real and generated ones.

    The model's own forward pass is the generator's, so the trained model turns noise into images.
    """

    def __init__(self, *, noise: int = 64, image_size: int = 16, channels: int = 1, width: int = 16) -> None:
        """Build both parts.

        Args:
            noise: numbers that an image is generated from.
            image_size: height and width, a power of 2 of at least 8.
            channels: channels of the images.
            width: channels of the largest layers, a multiple of 4; each layer of half the size has twice as many.

        Raises:
            ExperimentError: image size or width can't be built.
        """
        super().__init__()
        if image_size < 2 * _SMALLEST or image_size & (image_size - 1):
            raise ExperimentError.of("model.image_size", f"is {image_size}; write a power of 2 of at least 8")
        if width < 1 or width % _GROUPS:
            raise ExperimentError.of("model.width", f"is {width}; write a multiple of {_GROUPS}")
        doublings = (image_size // _SMALLEST).bit_length() - 1
        widths = [width * 2**place for place in range(doublings)]  # of the layers, from the image inwards
        self.generator = _generator(noise, widths, channels)
        self.discriminator = _discriminator(widths, channels)

    @override
    def forward(self, noise: Tensor) -> Tensor:
        """Generate images (batch, channels, height, width) from noise (batch, noise)."""
        images: Tensor = self.generator(noise)
        return images


def _generator(noise: int, widths: list[int], channels: int) -> nn.Sequential:
    inner = widths[-1] * 2
    layers: list[nn.Module] = [nn.Linear(noise, inner * _SMALLEST**2), nn.Unflatten(1, (inner, _SMALLEST, _SMALLEST))]
    for before, after in zip([inner, *widths[:0:-1]], widths[::-1], strict=True):
        layers += [nn.GroupNorm(_GROUPS, before), nn.ReLU(), nn.ConvTranspose2d(before, after, 4, stride=2, padding=1)]
    layers += [nn.GroupNorm(_GROUPS, widths[0]), nn.ReLU(), nn.Conv2d(widths[0], channels, 3, padding=1), nn.Tanh()]
    return nn.Sequential(*layers)


def _discriminator(widths: list[int], channels: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in zip([channels, *widths[:-1]], widths, strict=True):
        layers += [nn.Conv2d(before, after, 4, stride=2, padding=1), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(widths[-1] * _SMALLEST**2, 1))

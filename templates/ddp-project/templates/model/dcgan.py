"""The model: a convolutional generator and discriminator (Radford et al. 2015, DCGAN, arXiv 1511.06434).

Replace it with your own: any `nn.Module` with the parts `generator(noise) -> images` and `discriminator(images) ->
logits` can be used as `model:` in `experiments/*.yaml`, with its keyword arguments.

Groups of channels are normalized instead of batches, so the model trains the same on one worker and on many.
"""

from torch import Tensor, nn

_GROUPS = 4
_SMALLEST = 4  # height and width from which the generator begins, and where the discriminator ends


class DCGAN(nn.Module):
    """A generator of images with values from -1 to 1, and a discriminator of real and generated ones.

    Args:
        noise: numbers that an image is generated from.
        image_size: height and width, a power of 2 of at least 8.
        channels: channels of the images.
        width: channels of the largest layers, a multiple of 4; each layer of half the size has twice as many.
    """

    def __init__(self, *, noise: int, image_size: int, channels: int, width: int = 16) -> None:
        super().__init__()
        if image_size < 2 * _SMALLEST or image_size & (image_size - 1):
            raise ValueError(f"image_size is {image_size}; write a power of 2 of at least 8")
        if width < 1 or width % _GROUPS:
            raise ValueError(f"width is {width}; write a multiple of {_GROUPS}")
        doublings = (image_size // _SMALLEST).bit_length() - 1
        widths = [width * 2**place for place in range(doublings)]  # of the layers, from the image inwards
        self.generator = _generator(noise, widths, channels)
        self.discriminator = _discriminator(widths, channels)

    def forward(self, noise: Tensor) -> Tensor:
        """Generate images (batch, channels, image_size, image_size) from noise (batch, noise)."""
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

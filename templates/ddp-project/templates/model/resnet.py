"""The model: a residual network for images (He et al. 2015, arXiv 1512.03385).

Replace it with your own: any class or function that returns an `nn.Module` can be `model:` in an experiment.
Groups of channels are normalized (Wu and He 2018, arXiv 1803.08494) instead of batches, so that the model trains the
same on one worker and on many, and a worker's batch may be small.
"""

from collections.abc import Sequence

from torch import Tensor, nn


class ResNet(nn.Module):
    """Stages of residual blocks; each stage but the first halves the image and doubles the channels.

    Args:
        num_classes: number of logits.
        in_channels: channels of the images.
        width: channels of the first stage, a multiple of 8; compute grows with its square.
        depths: blocks in each stage. (2, 2, 2, 2) with a width of 64 has the size of ResNet-18.
    """

    def __init__(
        self, num_classes: int, *, in_channels: int, width: int = 16, depths: Sequence[int] = (1, 1, 1)
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [_convolution(in_channels, width), nn.ReLU()]
        channels = width
        for stage, depth in enumerate(depths):
            for block in range(depth):
                out_channels = width * 2**stage
                layers.append(_Block(channels, out_channels, stride=2 if stage and not block else 1))
                channels = out_channels
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (batch, in_channels, height, width) to logits (batch, num_classes)."""
        logits: Tensor = self.classifier(self.features(images).mean(dim=(2, 3)))
        return logits


class _Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            _convolution(in_channels, out_channels, stride=stride), nn.ReLU(), _convolution(out_channels, out_channels)
        )
        same = stride == 1 and in_channels == out_channels
        self.shortcut = nn.Identity() if same else _convolution(in_channels, out_channels, size=1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = nn.functional.relu(self.residual(x) + self.shortcut(x))
        return out


def _convolution(in_channels: int, out_channels: int, *, size: int = 3, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, size, stride=stride, padding=size // 2, bias=False),
        nn.GroupNorm(8, out_channels),
    )

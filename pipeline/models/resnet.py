"""Residual networks: He et al. 2015, "Deep Residual Learning for Image Recognition", arXiv 1512.03385.

Parameters have torchvision's names, so that its state dicts load at width 64 with the "imagenet" stem. As there, the
bottleneck's stride is in its 3x3 convolution ("ResNet v1.5"), and convolutions are initialized as in arXiv 1502.01852.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor, nn
from typing_extensions import override

from pipeline.errors import ExperimentError

Stem = Literal["cifar", "imagenet"]
Norm = Literal["batch", "group"]
NewNorm = Callable[[int], nn.BatchNorm2d | nn.GroupNorm]
"""Function that returns a normalization of a number of channels."""
_GROUPS, _LEAST_CHANNELS = 32, 4


class Basic(nn.Module):
    """Residual block of two 3x3 convolutions."""

    expansion = 1  # output channels relative to ``channels``

    def __init__(self, in_channels: int, *, channels: int, stride: int, norm: NewNorm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = norm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = norm(channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(in_channels, out_channels=channels, stride=stride, norm=norm)

    @property
    def last_norm(self) -> nn.BatchNorm2d | nn.GroupNorm:
        """Normalization at the end of the residual branch."""
        return self.bn2

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Add the residual branch to the shortcut."""
        residual = self.relu(self.bn1(self.conv1(x)))
        residual = self.bn2(self.conv2(residual))
        out: Tensor = self.relu(residual + self.downsample(x))
        return out


class Bottleneck(nn.Module):
    """Residual block of 1x1, 3x3 and 1x1 convolutions with four times ``channels`` output channels."""

    expansion = 4

    def __init__(self, in_channels: int, *, channels: int, stride: int, norm: NewNorm) -> None:
        super().__init__()
        out_channels = channels * self.expansion
        self.conv1 = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.bn1 = norm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn2 = norm(channels)
        self.conv3 = nn.Conv2d(channels, out_channels, 1, bias=False)
        self.bn3 = norm(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(in_channels, out_channels=out_channels, stride=stride, norm=norm)

    @property
    def last_norm(self) -> nn.BatchNorm2d | nn.GroupNorm:
        """Normalization at the end of the residual branch."""
        return self.bn3

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Add the residual branch to the shortcut."""
        residual = self.relu(self.bn1(self.conv1(x)))
        residual = self.relu(self.bn2(self.conv2(residual)))
        residual = self.bn3(self.conv3(residual))
        out: Tensor = self.relu(residual + self.downsample(x))
        return out


def _shortcut(in_channels: int, *, out_channels: int, stride: int, norm: NewNorm) -> nn.Module:
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    projection = nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False)
    return nn.Sequential(projection, norm(out_channels))


def _group_norm(channels: int) -> nn.GroupNorm:
    """Return a normalization with 32 groups (arXiv 1803.08494), fewer where a group would have less than 4 channels."""
    return nn.GroupNorm(math.gcd(_GROUPS, channels // _LEAST_CHANNELS) or 1, channels)


Block = type[Basic] | type[Bottleneck]


class ResNet(nn.Module):
    """Residual network: stem, four stages of residual blocks, pooling, classifier.

    Each stage doubles the channels. The "imagenet" stem reduces images to a quarter of their side length. The "cifar"
    stem keeps the size, for small images.
    """

    def __init__(
        self,
        block: Block,
        *,
        depths: Sequence[int],
        num_classes: int,
        width: int,
        in_channels: int,
        stem: Stem,
        zero_init_residual: bool,
        norm: Norm,
    ) -> None:
        super().__init__()
        if norm not in ("batch", "group"):
            raise ExperimentError.of("model.norm", f"is {norm!r}. Set it to batch or group.")
        new_norm: NewNorm = nn.BatchNorm2d if norm == "batch" else _group_norm
        if stem not in ("cifar", "imagenet"):
            raise ExperimentError.of("model.stem", f"is {stem!r}; write cifar (for small images) or imagenet")
        large = stem == "imagenet"
        kernel, stride = (7, 2) if large else (3, 1)
        self.conv1 = nn.Conv2d(in_channels, width, kernel, stride=stride, padding=kernel // 2, bias=False)
        self.bn1 = new_norm(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1) if large else nn.Identity()
        stages, last = list[nn.Sequential](), width
        for number, depth in enumerate(depths):
            blocks = list[nn.Module]()
            for position in range(depth):
                stride = 2 if number > 0 and position == 0 else 1
                blocks.append(block(last, channels=width * 2**number, stride=stride, norm=new_norm))
                last = width * 2**number * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8 * width * block.expansion, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif zero_init_residual and isinstance(module, Basic | Bottleneck):
                nn.init.zeros_(module.last_norm.weight)

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Map images (batch, in_channels, height, width) to logits (batch, num_classes)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits


def resnet18(
    num_classes: int,
    *,
    width: int = 64,
    in_channels: int = 3,
    stem: Stem = "cifar",
    zero_init_residual: bool = False,
    norm: Norm = "batch",
) -> ResNet:
    """Return a ResNet-18.

    Args:
        num_classes: number of classes, and of logits.
        width: channels of the first stage. Compute grows with the square of the width.
        in_channels: channels of the images.
        stem: "cifar" for images of about 32 pixels, "imagenet" for about 224.
        zero_init_residual: start each block as the identity, which helps with large batches (arXiv 1706.02677).
        norm: "batch" has statistics of each worker's batch; "group" (arXiv 1803.08494) trains the same model with any
            number of workers.
    """
    size = {"num_classes": num_classes, "width": width, "in_channels": in_channels}
    return ResNet(Basic, depths=(2, 2, 2, 2), **size, stem=stem, zero_init_residual=zero_init_residual, norm=norm)


def resnet50(
    num_classes: int,
    *,
    width: int = 64,
    in_channels: int = 3,
    stem: Stem = "cifar",
    zero_init_residual: bool = False,
    norm: Norm = "batch",
) -> ResNet:
    """Return a ResNet-50, with bottleneck blocks; arguments as for `resnet18`."""
    size = {"num_classes": num_classes, "width": width, "in_channels": in_channels}
    return ResNet(Bottleneck, depths=(3, 4, 6, 3), **size, stem=stem, zero_init_residual=zero_init_residual, norm=norm)

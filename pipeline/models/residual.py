"""The blocks that a residual network is made of: He et al. 2015, arXiv 1512.03385, figures 2 and 5."""

from torch import Tensor, nn
from typing_extensions import override


class Basic(nn.Module):
    """Two 3x3 convolutions beside a shortcut: (batch, in_channels, height, width) to (batch, channels, ...)."""

    expansion = 1
    """Channels that come out, relative to ``channels``."""

    def __init__(self, in_channels: int, *, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(in_channels, out_channels=channels, stride=stride)

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        """The normalization at the end of the residual branch."""
        return self.bn2

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Add the residual branch to the shortcut."""
        residual = self.relu(self.bn1(self.conv1(x)))
        residual = self.bn2(self.conv2(residual))
        out: Tensor = self.relu(residual + self.downsample(x))
        return out


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut; four times ``channels`` come out."""

    expansion = 4
    """Channels that come out, relative to ``channels``."""

    def __init__(self, in_channels: int, *, channels: int, stride: int) -> None:
        super().__init__()
        out_channels = channels * self.expansion
        self.conv1 = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(in_channels, out_channels=out_channels, stride=stride)

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        """The normalization at the end of the residual branch."""
        return self.bn3

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Add the residual branch to the shortcut."""
        residual = self.relu(self.bn1(self.conv1(x)))
        residual = self.relu(self.bn2(self.conv2(residual)))
        residual = self.bn3(self.conv3(residual))
        out: Tensor = self.relu(residual + self.downsample(x))
        return out


def _shortcut(in_channels: int, *, out_channels: int, stride: int) -> nn.Module:
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    projection = nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False)
    return nn.Sequential(projection, nn.BatchNorm2d(out_channels))

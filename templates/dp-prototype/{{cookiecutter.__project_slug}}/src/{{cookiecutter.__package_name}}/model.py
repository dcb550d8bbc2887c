"""A placeholder model: replace it with your own, under this name or another.

Any class or function that returns an `nn.Module` can be used as `model:` in `experiments/*.yaml`, with its keyword
arguments. Required: `forward` takes a batch of inputs from the data and returns the first argument of the loss. The
tests check this.
"""

from torch import Tensor, nn


class Net(nn.Module):
    """One convolution, its means over 4 x 4 parts of the image, and a linear classifier.

    Args:
        num_classes: number of logits.
        in_channels: channels of the images.
        width: channels of the convolution.
    """

    def __init__(self, num_classes: int, *, in_channels: int, width: int = 32) -> None:
        super().__init__()
        convolution = nn.Conv2d(in_channels, width, 5, stride=2, padding=2)
        self.features = nn.Sequential(convolution, nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten())
        self.classifier = nn.Linear(4 * 4 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (batch, in_channels, height, width) to logits (batch, num_classes)."""
        logits: Tensor = self.classifier(self.features(images))
        return logits

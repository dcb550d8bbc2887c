"""A placeholder model: replace it with your own, under this name or another.

Any class or function that returns an `nn.Module` can be used as `model:` in `experiments/*.yaml`, with its keyword
arguments. Required: `forward` takes a batch of inputs from the data and returns the first argument of the loss. The
tests check this.
"""

from torch import Tensor, nn


class Net(nn.Module):
    """A hidden layer.

    Args:
        out_features: numbers that are predicted.
        in_features: numbers in one sample.
        width: width of the hidden layer.
    """

    def __init__(self, out_features: int, *, in_features: int, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(in_features, width), nn.ReLU(), nn.Linear(width, out_features))

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs (batch, in_features) to outputs (batch, out_features)."""
        outputs: Tensor = self.layers(inputs)
        return outputs

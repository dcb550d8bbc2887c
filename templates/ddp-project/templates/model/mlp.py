"""The model: a multilayer perceptron.

Replace it with your own: any class or function that returns an `nn.Module` can be `model:` in an experiment.
"""

from collections.abc import Sequence

from torch import Tensor, nn


class MLP(nn.Module):
    """Fully connected layers with ReLU between them.

    Args:
        out_features: numbers that are predicted, for instance a logit for each class.
        in_features: numbers in one sample.
        hidden: width of each hidden layer.
    """

    def __init__(self, out_features: int, *, in_features: int, hidden: Sequence[int] = (128, 128)) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten()]
        for width in hidden:
            layers += [nn.Linear(in_features, width), nn.ReLU()]
            in_features = width
        self.layers = nn.Sequential(*layers, nn.Linear(in_features, out_features))

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs (batch, ...), with `in_features` numbers in each sample, to outputs (batch, out_features)."""
        outputs: Tensor = self.layers(inputs)
        return outputs

"""Multilayer perceptron, without batch statistics: training does not depend on how the batch is split."""

from collections.abc import Sequence

from torch import Tensor, nn
from typing_extensions import override


class MLP(nn.Module):
    """Fully connected layers with ReLU in between.

    ``hidden`` lists the width of each hidden layer and may be empty. Dropout follows each hidden layer.
    """

    def __init__(self, in_features: int, *, hidden: Sequence[int], num_classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten()]
        for width in hidden:
            layers += [nn.Linear(in_features, width), nn.ReLU(), nn.Dropout(dropout)]
            in_features = width
        self.layers = nn.Sequential(*layers, nn.Linear(in_features, num_classes))

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs (batch, ...), flattened to ``in_features``, to logits (batch, num_classes)."""
        logits: Tensor = self.layers(inputs)
        return logits

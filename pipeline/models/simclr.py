"""Encoder with a projection head, for contrastive learning."""

from torch import Tensor, nn
from typing_extensions import override


class SimCLR(nn.Module):
    """Encoder of features, and a head of two layers whose output the contrastive loss compares.

    The features are what is used afterwards. Source: Chen et al. 2020, arXiv 2002.05709.
    """

    def __init__(self, encoder: nn.Module, *, features: int, projection: int = 64) -> None:
        """Put a head on an ``encoder`` that maps inputs (batch, ...) to features (batch, ``features``)."""
        super().__init__()
        self.encoder = encoder
        self.head = nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.Linear(features, projection))

    @override
    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Map inputs (batch, ...) to features (batch, features) and projections (batch, projection)."""
        features = self.encoder(inputs)
        return features, self.head(features)

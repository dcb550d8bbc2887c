"""A placeholder model: replace it with your own, under this name or another.

Any class or function that returns an `nn.Module` can be used as `model:` in `experiments/*.yaml`, with its keyword
arguments. Required: `forward` takes a batch of inputs from the data and returns what the task expects. The tests check
this.
"""

from torch import Tensor, nn


class Net(nn.Module):
    """Predicts each next token from the one before it.

    Args:
        vocabulary_size: number of different tokens.
        width: features of a token.
    """

    def __init__(self, vocabulary_size: int, *, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(vocabulary_size, width), nn.Linear(width, vocabulary_size))

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, time), int64, to logits (batch, time, vocabulary_size)."""
        logits: Tensor = self.layers(tokens)
        return logits

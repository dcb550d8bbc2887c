"""The model. It is a stand-in: put your own in its place, under this name or another.

Any class or function that returns an `nn.Module` can stand behind `model:` in `experiments/*.yaml`; its keyword
arguments stand there, too. What has to stay: `forward` takes a batch of what the data gives as inputs and returns what
the task expects of a model. `tests/test_model.py` holds you to it.
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

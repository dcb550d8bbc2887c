"""Recurrent language model: Zaremba et al. 2014, "Recurrent Neural Network Regularization" (arXiv 1409.2329).

The weights of the embedding and the output are tied (Press and Wolf 2017, arXiv 1608.05859).
"""

from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

State = tuple[Tensor, Tensor]
"""Hidden state and cell state of each layer, both of shape (depth, batch, width)."""


class LSTM(nn.Module):
    """Language model that predicts each next token from the token and a state of those before it."""

    def __init__(self, vocabulary_size: int, *, width: int, depth: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary_size, width)
        self.dropout = nn.Dropout(dropout)
        between = dropout if depth > 1 else 0.0  # torch warns of dropout between layers where there is one
        self.layers = nn.LSTM(width, width, num_layers=depth, dropout=between, batch_first=True)
        self.bias = nn.Parameter(self.token.weight.new_zeros(vocabulary_size))
        nn.init.uniform_(self.token.weight, -0.1, 0.1)

    @override
    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Map tokens (batch, time), int64, that follow ``state`` to logits (batch, time, vocabulary) and a state."""
        hidden, state = self.layers(self.dropout(self.token(tokens)), state)
        return functional.linear(self.dropout(hidden), self.token.weight, self.bias), state

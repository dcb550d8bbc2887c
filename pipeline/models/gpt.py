"""Small decoder-only transformer: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners" (GPT-2).

Normalization before each sublayer and initialization as described there, learned positions, and tied weights of the
embedding and the output (Press and Wolf 2017, arXiv 1608.05859).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from pipeline.errors import ExperimentError


class GPT(nn.Module):
    """Language model that predicts each next token from the tokens before it."""

    def __init__(
        self, vocabulary_size: int, *, context_length: int, width: int, depth: int, heads: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if width % heads:
            message = f"is {heads}, which doesn't divide model.width: {width}; write a divisor of the width"
            raise ExperimentError.of("model.heads", message)
        self.context_length = context_length
        self.token = nn.Embedding(vocabulary_size, width)
        self.position = nn.Embedding(context_length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(_Block(width, heads=heads, dropout=dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        for name, module in self.named_modules():  # projections to the residual stream are smaller
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02 / (2 * depth) ** 0.5 if name.endswith("project") else 0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, time), int64, to logits (batch, time, vocabulary).

        Raises:
            ExperimentError: a sample has more tokens than ``context_length``.
        """
        time = tokens.shape[1]
        if time > self.context_length:
            message = (
                f"is {self.context_length}, but a sample has {time} tokens; use the same length for model and data"
            )
            raise ExperimentError.of("model.context_length", message)
        x = self.dropout(self.token(tokens) + self.position(torch.arange(time, device=tokens.device)))
        return functional.linear(self.norm(self.blocks(x)), self.token.weight)


class _Block(nn.Module):
    """Transformer block: attention, then a perceptron, each with a residual connection."""

    def __init__(self, width: int, *, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = _Attention(width, heads=heads, dropout=dropout)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.project = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        hidden = functional.gelu(self.expand(self.norm2(x)), approximate="tanh")
        out: Tensor = x + self.dropout(self.project(hidden))
        return out


class _Attention(nn.Module):
    """Causal multi-head self-attention (Vaswani et al. 2017, arXiv 1706.03762)."""

    def __init__(self, width: int, *, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    @override
    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.query_key_value(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout.p if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        out: Tensor = self.dropout(self.project(mixed.transpose(1, 2).flatten(2)))
        return out

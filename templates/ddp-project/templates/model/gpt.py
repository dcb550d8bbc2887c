"""The model: a small decoder-only transformer (GPT-2: Radford et al. 2019).

Replace it with your own: any class or function that returns an `nn.Module` can be `model:` in an experiment.
"""

import torch
from torch import Tensor, nn


class GPT(nn.Module):
    """Predicts each next token from the tokens before it.

    Args:
        vocabulary_size: number of different tokens.
        context_length: maximum number of tokens in a sequence.
        width: features of a token, a multiple of `heads`.
        depth: transformer blocks.
        heads: attention heads.
    """

    def __init__(
        self, vocabulary_size: int, *, context_length: int, width: int = 64, depth: int = 2, heads: int = 4
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary_size, width)
        self.position = nn.Embedding(context_length, width)
        self.blocks = nn.Sequential(*(_Block(width, heads=heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, time), int64, to logits (batch, time, vocabulary_size)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.token(tokens) + self.position(positions))
        return nn.functional.linear(self.norm(x), self.token.weight)  # one matrix reads and writes tokens


class _Block(nn.Module):
    """Causal attention, then a perceptron, each normalized before and added to what it read."""

    def __init__(self, width: int, *, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.project(self._attention(self.query_key_value(self.norm1(x))))
        out: Tensor = x + self.perceptron(x)
        return out

    def _attention(self, query_key_value: Tensor) -> Tensor:
        batch, time, _ = query_key_value.shape
        heads = query_key_value.view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)

"""The data: a text, character by character.

Replace it with your own: any function that returns a training and a validation dataset can be `data:` in an
experiment, with its keyword arguments. Each worker calls it and must get the same data.
"""

from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

VOCABULARY_SIZE = 128
"""Tokens are ASCII codes; other characters become "?"."""


def text(
    *, source: str | None = None, context_length: int = 64, limit: int | None = None
) -> tuple[TensorDataset, TensorDataset]:
    """Pairs of tokens and the tokens that follow them, both int64 of (context_length).

    Args:
        source: a UTF-8 text file. Default: the text of Python's own help().
        context_length: tokens in a sample.
        limit: use only this many samples, training and validation together.
    """
    content = Path(source).read_text(encoding="utf-8") if source else "\n".join(topics[key] for key in sorted(topics))
    tokens = encode(content)
    samples = (len(tokens) - 1) // context_length
    inputs = _windows(tokens, samples, context_length)[:limit]
    targets = _windows(tokens[1:], samples, context_length)[:limit]
    train = len(inputs) - len(inputs) // 10  # the last tenth of the text is for validation
    return TensorDataset(inputs[:train], targets[:train]), TensorDataset(inputs[train:], targets[train:])


def encode(text: str) -> Tensor:
    """Tokens of a text, int64 of (characters)."""
    return torch.tensor(list(text.encode("ascii", errors="replace")), dtype=torch.int64)


def decode(tokens: Tensor) -> str:
    """Text of tokens."""
    return bytes(tokens.tolist()).decode("ascii")


def _windows(tokens: Tensor, samples: int, length: int) -> Tensor:
    return tokens[: samples * length].view(samples, length)

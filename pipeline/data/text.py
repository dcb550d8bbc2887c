"""Text for language models of characters. The default text needs no download."""

from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from pipeline.data.splits import Splits, check_fraction
from pipeline.errors import ExperimentError

VOCABULARY_SIZE: Final = 128
"""Number of ASCII codes, which are the tokens; other characters become "?"."""


def characters(
    *,
    context_length: int = 64,
    source: str | None = None,
    max_characters: int | None = None,
    validation_fraction: float = 0.1,
) -> Splits:
    """Return windows of a text as pairs (tokens, next_tokens), a token for each character.

    Both are int64 of shape (context_length,) with values below 128. Windows overlap only in the last next token. A
    remainder at the end is not used.

    Args:
        context_length: tokens in a window.
        source: UTF-8 text file. Default: the topics of Python's help(), about 450,000 characters of English, the same
            on all machines with the same Python version.
        max_characters: use only this many characters from the start of the text.
        validation_fraction: part of the text to validate on, taken from its end; 0 for none.

    Raises:
        ExperimentError: the source can't be read, or is too short for a window.
    """
    check_fraction(validation_fraction)
    if source is None:
        from pydoc_data.topics import topics  # half a megabyte of source, loaded only if used

        text = "\n".join(topics[name] for name in sorted(topics))
    else:
        try:
            text = Path(source).read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            message = f"can't read {source} as UTF-8 text ({error}); name another file"
            raise ExperimentError.of("data.source", message) from error
    tokens = torch.tensor(list(text.encode("ascii", errors="replace")), dtype=torch.int64)[:max_characters]
    cut = len(tokens) - round(validation_fraction * len(tokens))
    held_out = _windows(tokens[cut:], length=context_length) if validation_fraction else None
    return Splits(_windows(tokens[:cut], length=context_length), held_out)


def _windows(tokens: Tensor, *, length: int) -> TensorDataset:
    if length < 1 or len(tokens) <= length:
        most = max(1, len(tokens) - 1)
        message = f"is {length}, but the text has {len(tokens)} characters; write a number from 1 to {most}"
        raise ExperimentError.of("data.context_length", message)
    used = (len(tokens) - 1) // length * length
    return TensorDataset(tokens[:used].view(-1, length), tokens[1 : used + 1].view(-1, length))

"""Text for language models of characters or words, by default one that needs no download."""

import re
from collections import Counter
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
    """Return windows of a text as (tokens, next_tokens), both int64 of shape (context_length,) with values below 128.

    Windows overlap only in the last next token; a remainder at the end is not used. Validation is the end of the text.

    Args:
        context_length: tokens in a window.
        source: UTF-8 text file; default: the topics of Python's help(), some 450 000 characters of English, equal on
            all machines with the same Python.
        max_characters: use only the beginning of the text.
        validation_fraction: part of the text to validate on; 0 for none.

    Raises:
        ExperimentError: the source can't be read, or is too short for a window.
    """
    check_fraction(validation_fraction)
    text = (_python_topics() if source is None else _read(Path(source))).encode("ascii", errors="replace")
    tokens = torch.tensor(list(text), dtype=torch.int64)[:max_characters]
    cut = len(tokens) - round(validation_fraction * len(tokens))
    train, rest = tokens[:cut], tokens[cut:]
    held_out = _windows(rest, length=context_length, unit="characters") if validation_fraction else None
    return Splits(_windows(train, length=context_length, unit="characters"), held_out)


def words(
    *,
    context_length: int = 35,
    vocabulary_size: int = 2000,
    source: str | None = None,
    validation_fraction: float = 0.1,
) -> Splits:
    """Return windows of a text's words as (tokens, next_tokens), both int64 of shape (context_length,), in text order.

    Words are in lower case, and punctuation and line ends are words, too. Token 0 stands for all words but the most
    frequent ones of the training part. Windows overlap only in the last next token; a remainder at the end is not used.

    Args:
        context_length: words in a window.
        vocabulary_size: tokens, that of other words included.
        source: UTF-8 text file; default: the text of `characters`, some 100 000 words.
        validation_fraction: part of the text to validate on, its end; 0 for none.

    Raises:
        ExperimentError: the source can't be read, or is too short for a window.
    """
    check_fraction(validation_fraction)
    text = _python_topics() if source is None else _read(Path(source))
    found = re.findall(r"\w+|[^\w\s]|\n", text.lower())
    cut = len(found) - round(validation_fraction * len(found))
    frequent = Counter(found[:cut]).most_common(vocabulary_size - 1)
    numbers = {word: number for number, (word, _) in enumerate(frequent, start=1)}
    tokens = torch.tensor([numbers.get(word, 0) for word in found], dtype=torch.int64)
    train, rest = tokens[:cut], tokens[cut:]
    held_out = _windows(rest, length=context_length, unit="words") if validation_fraction else None
    return Splits(_windows(train, length=context_length, unit="words"), held_out)


def _windows(tokens: Tensor, *, length: int, unit: str) -> TensorDataset:
    if length < 1 or len(tokens) <= length:
        most = max(1, len(tokens) - 1)
        message = f"is {length}, but the text has {len(tokens)} {unit}; write a number from 1 to {most}"
        raise ExperimentError.of("data.context_length", message)
    used = (len(tokens) - 1) // length * length
    return TensorDataset(tokens[:used].view(-1, length), tokens[1 : used + 1].view(-1, length))


def _read(source: Path) -> str:
    try:
        return source.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ExperimentError.of("data.source", f"can't read {source} as UTF-8 text ({error}); name another") from error


def _python_topics() -> str:
    from pydoc_data.topics import topics  # half a megabyte of source, loaded only if used

    return "\n".join(topics[name] for name in sorted(topics))

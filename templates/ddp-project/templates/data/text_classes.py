"""The data: texts of a CSV file, `text,label`, each with the name of its class.

Replace it with your own: any function that returns a training and a validation dataset (map-style, of mappings that the
tokenizer can pad) can be used as `data:` in `experiments/*.yaml`, with its keyword arguments. It is called once in each
worker and must return the same data in all of them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.data import read_csv
from torch.utils.data import Dataset
from transformers import AutoTokenizer

CLASSES = ("attribute-access", "debugger", "formatstrings", "string-methods")
"""Labels in the order of the model's outputs, so that answers stay the same when texts are added."""
_EVERY = 5  # of five texts, one is for validation


class Texts(Dataset[dict[str, Any]]):
    """Samples {input_ids, attention_mask, ..., labels} of different lengths; `loader.collate` pads a batch."""

    def __init__(self, samples: Sequence[dict[str, Any]]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.samples[index]


def text_classes(
    path: str | Path, *, tokenizer: str, max_length: int = 128, limit: int | None = None
) -> tuple[Texts, Texts]:
    """Training and validation texts.

    Args:
        path: UTF-8 CSV file with the columns text and label.
        tokenizer: folder of a tokenizer of transformers, or its name on the hub.
        max_length: tokens after which a text is cut off.
        limit: use only this many texts, training and validation together, evenly spread.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: a label is not among CLASSES, or a row has more or fewer fields than columns.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} is not there; put your texts there")
    rows = read_csv(path, ["text", "label"])
    rows = rows[:: -(-len(rows) // limit)] if limit else rows
    for line, row in rows:
        if row["label"] not in CLASSES:
            raise ValueError(f"{path}:{line}: label {row['label']!r} is not among CLASSES in {__name__}; add it there")
    tokens = encode([row["text"] for _, row in rows], tokenizer=tokenizer, max_length=max_length)
    samples = [
        {**{name: values[number] for name, values in tokens.items()}, "labels": CLASSES.index(row["label"])}
        for number, (_, row) in enumerate(rows)
    ]
    return Texts([sample for number, sample in enumerate(samples) if number % _EVERY]), Texts(samples[::_EVERY])


def encode(texts: Sequence[str], *, tokenizer: str, max_length: int, **settings: Any) -> Any:
    """Tokens of texts, for training and for new texts; `settings` are those of the tokenizer's call."""
    return AutoTokenizer.from_pretrained(tokenizer)(list(texts), truncation=True, max_length=max_length, **settings)

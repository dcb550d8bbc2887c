"""Labelled texts from a CSV file, tokenized for text classification."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from typing_extensions import override

from pipeline.config.extras import needs
from pipeline.data.csv_rows import read_csv
from pipeline.data.padding import load_tokenizer
from pipeline.data.splits import check_fraction
from pipeline.errors import ExperimentError
from pipeline.wording import did_you_mean

Sample = dict[str, Any]


@needs("transformers")
def texts(
    source: str,
    *,
    tokenizer: str,
    text: str = "text",
    label: str = "label",
    max_length: int = 128,
    validation_fraction: float = 0.1,
) -> tuple[Dataset[Sample], Dataset[Sample] | None]:
    """Return tokenized texts as mappings {input_ids, attention_mask, ..., labels}.

    ``labels`` is the number of the class. Sequences differ in length, so a batch needs padding. Set
    ``loader.collate`` to pipeline.data.padding.padded.

    Args:
        source: CSV file in UTF-8 with column names in its first line. Quote a field that has a comma.
        tokenizer: folder of a transformers tokenizer, or its name on the Hugging Face hub.
        text: column of the texts.
        label: column of the classes. They are numbered in alphabetical order, or by value if all are numbers.
        max_length: number of tokens to which longer texts are truncated.
        validation_fraction: part of the texts to validate on, drawn with the experiment's seed; 0 for none.

    Raises:
        ExperimentError: the file or the tokenizer can't be read, or the file lacks a column, or a row lacks a field.
    """
    check_fraction(validation_fraction)
    rows = _rows(Path(source), columns={"text": text, "label": label})
    tokens = load_tokenizer(tokenizer, key="data.tokenizer")(
        [row[text] for row in rows], truncation=True, max_length=max_length
    )
    numbers = {name: number for number, name in enumerate(_in_order({row[label] for row in rows}))}
    samples = [
        {**{name: values[index] for name, values in tokens.items()}, "labels": numbers[row[label]]}
        for index, row in enumerate(rows)
    ]
    order = torch.randperm(len(samples)).tolist()
    cut = len(samples) - round(validation_fraction * len(samples))
    validation = _Texts([samples[index] for index in order[cut:]]) if validation_fraction else None
    return _Texts([samples[index] for index in order[:cut]]), validation


class _Texts(Dataset[Sample]):
    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    @override
    def __getitem__(self, index: int) -> Sample:
        return self._samples[index]


def _in_order(labels: Collection[str]) -> list[str]:
    """Sort labels as numbers if all of them are numbers, else as text."""
    as_text = sorted(labels)
    try:
        return sorted(as_text, key=float)
    except ValueError:
        return as_text


def _rows(source: Path, *, columns: Mapping[str, str]) -> list[dict[str, str]]:
    """Read the rows, without white space around labels, where a space would make another class."""
    try:
        rows = read_csv(source)
    except OSError as error:
        raise ExperimentError.of("data.source", f"can't read {source} as CSV ({error}); name another file") from error
    except ValueError as error:
        raise ExperimentError.of("data.source", str(error)) from error
    names = list(rows[0].fields)
    for key, name in columns.items():
        if name not in names:
            meant = did_you_mean(name, names) or f"; it has {', '.join(names)}"
            raise ExperimentError.of(f"data.{key}", f"{source} has no column {name}{meant}")
    for row in rows:
        row.fields[columns["label"]] = row.fields[columns["label"]].strip()
        if not row.fields[columns["label"]]:
            message = f"{source}:{row.line}: {columns['label']} is empty. Fill it in, or remove the row."
            raise ExperimentError.of("data.source", message)
    return [row.fields for row in rows]

"""Texts of a CSV file tokenized for classification, and batches of token sequences that differ in length, padded."""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from typing_extensions import override

from pipeline.data.splits import check_fraction
from pipeline.errors import ExperimentError
from pipeline.experiment.targets import needs
from pipeline.wording import counted, did_you_mean

_SHOWN = 200  # Characters of a row in an error message


class CsvRow(NamedTuple):
    """A row of a CSV file."""

    line: int  # Line in which it starts, counted from 1
    fields: dict[str, str]  # Fields by column


def read_csv(path: str | Path, columns: Iterable[str] = ()) -> list[CsvRow]:
    """Read a CSV file in UTF-8, with or without a byte order mark, that has column names in its first row.

    Args:
        path: the file.
        columns: columns that it must have.

    Raises:
        OSError: the file can't be read.
        ValueError: it is not in UTF-8, or has no such column, no rows, or a row that has not one field for each column.
    """
    found, line = list[tuple[int, list[str]]](), 1
    with Path(path).open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)  # otherwise an open quote takes in all rows after it
        try:
            for fields in reader:
                if fields:  # skips blank lines
                    found.append((line, fields))
                line = reader.line_num + 1
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: is not in UTF-8 ({error}). Save it in UTF-8.") from None
        except csv.Error as error:
            raise ValueError(
                f"{path}:{line}: the row that starts here can't be read ({error}). Check its quotes: "
                'a quoted field ends with a quote, and a quote inside it is written twice, e.g. "a 5"" disk".'
            ) from None
    (line, names), *rows = found or [(1, [])]
    if missing := [name for name in columns if name not in names]:
        raise ValueError(f"{path}:{line}: has no column {', '.join(missing)}. It has {', '.join(names) or 'none'}.")
    if not rows:
        raise ValueError(f"{path}: has no rows after its column names. Add rows.")
    for line, fields in rows:
        if len(fields) != len(names):
            shown = ", ".join(map(repr, fields))
            shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]} ..."
            are_more = len(fields) > len(names)
            remedy = "Put quotes around a field that has a comma" if are_more else "Add the missing fields"
            raise ValueError(
                f"{path}:{line}: the row has {counted(len(fields), 'field')} ({shown}) for "
                f"{counted(len(names), 'column')} ({', '.join(names)}). {remedy}."
            )
    return [CsvRow(line, dict(zip(names, fields, strict=True))) for line, fields in rows]


IGNORED = -100  # Label of padding, which losses ignore
Batch = dict[str, Tensor]
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
    names = sorted({row[label] for row in rows})
    with suppress(ValueError):  # not all of them are numbers
        names = sorted(names, key=float)
    numbers = {name: number for number, name in enumerate(names)}
    samples = [
        {**{name: values[index] for name, values in tokens.items()}, "labels": numbers[row[label]]}
        for index, row in enumerate(rows)
    ]
    order = torch.randperm(len(samples)).tolist()
    cut = len(samples) - round(validation_fraction * len(samples))
    validation = _Texts([samples[index] for index in order[cut:]]) if validation_fraction else None
    return _Texts([samples[index] for index in order[:cut]]), validation


@needs("transformers")
def padded(
    tokenizer: str, *, labels: str = "labels", pad_token: str | None = None, multiple_of: int | None = None
) -> Callable[[Sequence[Mapping[str, Any]]], Batch]:
    """Return a collate_fn that pads mappings such as {input_ids, attention_mask, labels}.

    Args:
        tokenizer: folder of a transformers tokenizer, or its name on the Hugging Face hub.
        labels: key of the labels. Sequences of labels are padded with -100, on the tokenizer's padding side.
        pad_token: token to pad with, for tokenizers without a padding token.
        multiple_of: round lengths up to a multiple of this number, which is faster on tensor cores.

    Raises:
        ExperimentError: the tokenizer can't be loaded, or has no padding token.
    """
    loaded = load_tokenizer(tokenizer, key="loader.collate.tokenizer")
    if pad_token is not None:
        loaded.pad_token = pad_token
    if loaded.pad_token is None:
        message = f"{tokenizer} has no padding token; set one, e.g. {loaded.eos_token}"
        raise ExperimentError.of("loader.collate.pad_token", message)
    return _Padding(loaded, labels=labels, multiple_of=multiple_of)


def load_tokenizer(path: str, *, key: str) -> Any:
    """Load a tokenizer of transformers, which runs no code.

    Raises:
        ExperimentError: it can't be loaded.
    """
    from transformers import AutoTokenizer  # takes seconds, and is an extra

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        said = " ".join(str(error).split())[:300]
        raise ExperimentError.of(key, f"can't load a tokenizer from {path}: {said}") from error


class _Texts(Dataset[Sample]):
    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    @override
    def __getitem__(self, index: int) -> Sample:
        return self._samples[index]


class _Padding:
    def __init__(self, tokenizer: Any, *, labels: str, multiple_of: int | None) -> None:
        self._tokenizer, self._labels, self._multiple_of = tokenizer, labels, multiple_of
        tokenizer.deprecation_warnings["Asking-to-pad-a-fast-tokenizer"] = True  # texts are tokens already

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> Batch:
        names = [name for name in samples[0] if name != self._labels]
        inputs = {name: [sample[name] for sample in samples] for name in names}
        batch = dict(
            self._tokenizer.pad(inputs, padding=True, pad_to_multiple_of=self._multiple_of, return_tensors="pt")
        )
        if self._labels in samples[0]:
            given = [torch.as_tensor(sample[self._labels]) for sample in samples]
            if not given[0].ndim:
                return {**batch, self._labels: torch.stack(given)}
            length = torch.empty(batch["input_ids"].shape[1], dtype=given[0].dtype)  # as long as the inputs
            side = self._tokenizer.padding_side
            whole = pad_sequence([*given, length], batch_first=True, padding_value=IGNORED, padding_side=side)
            batch[self._labels] = whole[:-1]
        return batch


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

"""Rows of a CSV file, each checked to have a field for each column."""

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from pipeline.wording import counted

_SHOWN = 200
"""Characters of a row in an error message."""


class CsvRow(NamedTuple):
    """A row of a CSV file."""

    line: int
    """Line in which it starts, counted from 1."""
    fields: dict[str, str]
    """Fields by column."""


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

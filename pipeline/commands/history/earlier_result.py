"""Results of commands that earlier versions had: the lists in their files as tables."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.errors import UsageError
from pipeline.recording.journal.run_summary import RunSummary
from pipeline.report.text.tables import ReportTable
from pipeline.wording import figure

FILES: Mapping[str, str] = {"predict": "prediction.json", "tune-batch": "tuning.json"}
"""File with the result, by command."""


@dataclass(frozen=True)
class EarlierResult:
    """A result to print, see `pipeline.recording.terminal.console.Printable`."""

    opening: tuple[str, ...]
    tables: tuple[ReportTable, ...]
    verdict: str
    text: str
    """The file itself."""
    blocks: tuple[tuple[str, ...], ...] = ()


def read_earlier(run: RunSummary) -> EarlierResult | None:
    """Read the result of an earlier command; None if it ended without a result.

    Raises:
        UsageError: the file is damaged.
    """
    path = run.folder / FILES[run.command]
    try:
        text = path.read_text(encoding="utf-8")
        document = json.loads(text)
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        raise UsageError(f"{path}: damaged. It was written by an earlier version of pipeline.") from None
    title = f"{run.experiment}: result of pipeline {run.command} of an earlier version"
    return EarlierResult((title, str(path)), tuple(_iter_tables(document)), run.verdict or title, text)


def _iter_tables(document: Any, *, title: str = "") -> Iterator[ReportTable]:
    """Yield a table for each list of records in a document."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield from _iter_tables(value, title=key)
    elif isinstance(document, list) and document and all(isinstance(each, dict) for each in document):
        header = [key for key, value in document[0].items() if not isinstance(_value(value), dict | list)]
        if header:
            rows = tuple(tuple(_format(each.get(key)) for key in header) for each in document)
            yield ReportTable(title=title, header=tuple(header), rows=rows)
        for each in document:
            yield from _iter_tables(each)


def _value(value: Any) -> Any:
    """Return the median of a measurement of several windows, any other value as it is."""
    return value["median"] if isinstance(value, dict) and "median" in value else value


def _format(value: Any) -> str:
    shown = _value(value)
    if shown is None:
        return "-"
    return figure(shown) if isinstance(shown, float) else str(shown)

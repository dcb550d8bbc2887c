"""The parts of a screen that show a report's rows: their table, their losses, and where the time of a step goes."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pipeline.report import Row, Unmeasured, is_clear
from pipeline.report.breakdown import break_down, count_decimals
from pipeline.report.loss_differences import describe_loss, explain_loss
from pipeline.report.ratios import format_level, is_wide
from pipeline.report.report import Report
from pipeline.report.row_names import count_workers, label_row
from pipeline.report.screens.screen_layout import Block, Column, Places, lay_out, wrap
from pipeline.report.tables import amount, efficiency, speedup, training_s
from pipeline.wording import duration

_NONE = "-"
_MOST_ROWS, _MOST_LINES = 10, 12
"""Rows of a table, and lines with its head; the report has all rows."""


class LossNotes(NamedTuple):
    """The losses of a report's rows in a column, and the notes that it refers to."""

    cells: tuple[str, ...]
    """One for each entry."""
    notes: tuple[str, ...]


def format_table(report: Report, places: Places) -> Block:
    """Return the table of throughput, speedup and loss, with as many rows as a screen has room for."""
    for most in range(_MOST_ROWS, 1, -1):
        entries = _select(report, most)
        lines = lay_out(list(_columns(report, entries)))
        if len(lines) <= _MOST_LINES:
            break
    hidden = len(report.entries) - len(entries)
    return Block((*lines, *([f"{hidden} more rows: pipeline show {places.run} --full"] if hidden else [])))


def _select(report: Report, most: int) -> tuple[Row | Unmeasured, ...]:
    """Return the first rows, and the one that the result is about in any case."""
    entries = report.entries[:most]
    return entries if report.main in entries or len(report.entries) <= most else (*entries[:-1], report.main)


def _columns(report: Report, entries: Sequence[Row | Unmeasured]) -> Iterator[Column]:
    """Yield the columns of the table; the intervals have one unless all speedups are clear."""
    ratios = [row.ratio for row in report.rows if row.ratio is not None]
    has_intervals = report.is_comparison or any(not is_clear(ratio) or is_wide(ratio) for ratio in ratios)
    unit = "cores" if report.main.device == "cpu" else "GPUs"
    yield Column("", tuple(map(label_row, entries)), is_text=True)
    yield Column(unit, _cells(entries, lambda row: str(row.device_count)), 1)
    yield Column("samples/s", _cells(entries, lambda row: amount(row.samples_per_second.median)))
    if ratios and has_intervals:
        level = format_level(report.main.confidence)
        yield Column(f"speedup ({level} CI)", tuple(map(_format_speedup, entries)))
    elif ratios:
        yield Column("speedup", _cells(entries, lambda row: f"{row.ratio.value:.2f}x" if row.ratio else _NONE))
        yield Column("efficiency", _cells(entries, efficiency), 2)
        yield from _estimated_time(report, entries)
    if any(row.same_training for row in report.rows):
        yield Column(*_loss_column(report, entries))


def note_losses(report: Report) -> LossNotes:
    """Return how each row's loss compares with the baseline's, with numbered notes on those that differ."""
    baseline, notes, cells = report.rows[0], list[str](), list[str]()
    for entry in report.entries:
        text = describe_loss(entry, baseline) if isinstance(entry, Row) else ""
        if text and text not in notes and explained(entry, baseline):
            notes.append(text)
        if not isinstance(entry, Row) or entry.same_training is None or entry == baseline:
            cells.append(_NONE)
        elif not text:
            cells.append("same")
        else:
            cells.append(f"[{notes.index(text) + 1}]" if text in notes else "differs")
    return LossNotes(tuple(cells), tuple(f"[{number}] {note}" for number, note in enumerate(notes, start=1)))


def explained(entry: Row | Unmeasured, baseline: Row) -> bool:
    """Return True unless a row's loss differs from the start, and nothing explains that."""
    return not isinstance(entry, Row) or entry.same_training != "no" or bool(explain_loss(entry, baseline))


def format_loss_notes(report: Report) -> Block:
    """Return the notes that the table's column of losses refers to."""
    return Block(tuple(line for note in note_losses(report).notes for line in wrap(note, rest="    ")))


def format_step_time(row: Row) -> tuple[str, ...]:
    """Return the step time of a row as the sum of its parts; no lines if they were not measured."""
    if row.parts.sum_ms is None:
        return ()
    decimals = count_decimals(row.step_ms.median)
    if (parts := break_down(row, decimals=decimals)) is None:
        total = f"{row.parts.sum_ms:,.{decimals}f} ms"
        return wrap(
            f"The step-time breakdown is left out: its parts, measured after training, add up to {total}, but a step "
            f"takes {row.step_ms.median:,.{decimals}f} ms."
        )
    named = {
        "compute": parts.compute,
        "exposed communication": parts.exposed,
        "data loading": parts.data,
        "optimizer and other": parts.rest,
    }
    terms = " + ".join(f"{ms:,.{decimals}f} {name}" for name, ms in named.items() if ms is not None)
    sign, name = ("+", "unaccounted") if parts.unaccounted >= 0 else ("-", "measurement noise")
    remainder = f" {sign} {abs(parts.unaccounted):,.{decimals}f} {name}" if parts.unaccounted else ""
    return wrap(f"Step time, {count_workers(row)} (ms): {parts.total:,.{decimals}f} total = {terms}{remainder}")


def format_step_times(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the step times of several rows as a table; no lines if nothing was measured, or if there is no room."""
    measured = [row for row in rows if row.parts.sum_ms is not None]
    if not measured or len(measured) > _MOST_ROWS:
        return ()
    decimals = count_decimals(min(row.step_ms.median for row in measured))
    parts = [break_down(row, decimals=decimals) for row in measured]

    def column(head: str, values: Sequence[float | None]) -> Column:
        return Column(head, tuple(_NONE if value is None else f"{value:,.{decimals}f}" for value in values))

    columns = [
        Column("Step time (ms)\n", tuple(map(label_row, measured)), is_text=True),
        column("total\n", [row.step_ms.median for row in measured]),
        column("compute\n", [each and each.compute for each in parts]),
        column("exposed\ncomm.", [each and each.exposed for each in parts]),
        column("data\nloading", [each and each.data for each in parts]),
        column("optimizer\nand other", [each and each.rest for each in parts]),
        column("un-\naccounted", [each and each.unaccounted for each in parts]),
    ]
    missing = ("Parts that do not add up to the step are left out.",) if None in parts else ()
    return (*lay_out(columns), *missing)


def _loss_column(report: Report, entries: Sequence[Row | Unmeasured]) -> tuple[str, tuple[str, ...]]:
    of_entry = dict(zip(report.order, note_losses(report).cells, strict=True))
    cells = tuple(of_entry[entry.trial] for entry in entries)
    if "differs" not in cells:
        return "loss", cells
    return "loss vs. baseline", tuple("differs (see above)" if cell == "differs" else cell for cell in cells)


def _estimated_time(report: Report, entries: Sequence[Row | Unmeasured]) -> list[Column]:
    if not report.main.whole_training:
        return []
    start_s = report.main.time_to_first_step_s or 0.0
    return [Column("est. time", _cells(entries, lambda row: duration(training_s(row, start_s=start_s))), 3)]


def _format_speedup(entry: Row | Unmeasured) -> str:
    return speedup(entry) if isinstance(entry, Row) else "not measured"


def _cells(entries: Sequence[Row | Unmeasured], text: Callable[[Row], str]) -> tuple[str, ...]:
    return tuple(text(entry) if isinstance(entry, Row) else _NONE for entry in entries)

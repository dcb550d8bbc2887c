"""The parts of a screen that show a report's rows: their table, their losses, and where the time of a step goes."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pipeline.report.numbers.forecast import Predicted
from pipeline.report.numbers.old_breakdown import PARTS, break_down, count_decimals, has_consistent_parts
from pipeline.report.numbers.row import Row, Unmeasured
from pipeline.report.report import Report
from pipeline.report.screens.screen_layout import Block, Column, Places, lay_out, wrap
from pipeline.report.text.claims import classify_speedup
from pipeline.report.text.loss_differences import describe_loss
from pipeline.report.text.ratios import format_level, is_wide, value_of
from pipeline.report.text.row_names import count_workers, label_row
from pipeline.report.text.tables import amount, efficiency, speedup, step_parts, training_s
from pipeline.wording import counted, duration

Entry = Row | Unmeasured | Predicted
_NONE = "-"
_SHOWN_ABOVE = "differs (see above)"
_MOST_ROWS, _MOST_LINES = 10, 12
"""Rows of a table, and lines with its head; the report has all rows."""
_FEWEST_LINES = 4
"""Lines of a table on a screen that has much else to show."""


class LossNotes(NamedTuple):
    """The losses of a report's rows in a column, and the notes that it refers to."""

    cells: tuple[str, ...]
    """One for each row of the table."""
    notes: tuple[str, ...]


def format_table(report: Report, places: Places, *, most_lines: int = _MOST_LINES) -> tuple[Block, Block]:
    """Return the table of throughput, speedup and loss, with as many rows as there is room for, and its notes."""
    for most in range(_MOST_ROWS, 1, -1):
        entries = _select(report, most)
        losses = note_losses(report, entries)
        lines = lay_out(list(_columns(report, entries, losses=losses)))
        if len(lines) <= most_lines:
            break
    hidden = len(report.entries) + len(report.predicted) - len(entries)
    more = wrap(f"{counted(hidden, 'more row')}: pipeline show {places.run} --full") if hidden else ()
    notes = tuple(line for note in losses.notes for line in wrap(note, rest="    "))
    return Block((*lines, *more)), Block(notes)


def iter_tables(report: Report, places: Places) -> Iterator[tuple[Block, Block]]:
    """Yield the table with its notes, each time with fewer lines, for a screen to take the first one that fits."""
    for most_lines in range(_MOST_LINES, _FEWEST_LINES - 1, -1):
        yield format_table(report, places, most_lines=most_lines)


def _select(report: Report, most: int) -> tuple[Entry, ...]:
    """Return the first measured rows, the one that the result is about in any case, and the predicted rows."""
    predicted = report.predicted[: most // 2]
    most -= len(predicted)
    entries = report.entries[:most]
    if report.main not in entries and len(report.entries) > most:
        entries = (*entries[:-1], report.main)
    return (*entries, *predicted)


def _columns(report: Report, entries: Sequence[Entry], *, losses: LossNotes) -> Iterator[Column]:
    """Yield the columns of the table; the intervals have one unless all speedups are clear."""
    ratios = [row.ratio for row in report.rows if row.ratio is not None]
    has_intervals = report.is_comparison or any(not ratio.is_clear or is_wide(ratio) for ratio in ratios)
    unit = "cores" if report.main.device == "cpu" else "GPUs"
    yield Column("", tuple(map(label_row, entries)), is_text=True)
    yield Column(unit, _cells(entries, lambda row: str(row.device_count)), 1)
    yield Column("samples/s", _cells(entries, lambda row: amount(row.samples_per_second.median)))
    if ratios and has_intervals:
        level = format_level(report.main.confidence)
        yield Column(f"speedup ({level} CI)", tuple(map(_format_speedup, entries)))
    elif ratios:
        yield Column("speedup", _cells(entries, lambda row: value_of(row.ratio) if row.ratio else _NONE))
        yield Column("efficiency", _cells(entries, efficiency), 2)
        yield from _build_time_columns(report, entries)
    if any(row.same_training for row in report.rows):
        yield _loss_column(losses)


def note_losses(report: Report, entries: Sequence[Entry]) -> LossNotes:
    """Return how the loss of each entry compares with the baseline's, with numbered notes on those that differ.

    The screen itself, and no note, says that the result's speedup is not valid.
    """
    baseline, notes, cells = report.rows[0], list[str](), list[str]()
    for entry in entries:
        text = describe_loss(entry, baseline) if isinstance(entry, Row) else ""
        if not isinstance(entry, Row) or entry.same_training is None or entry == baseline:
            cells.append(_NONE)
        elif not text:
            cells.append("same")
        elif entry == report.main and classify_speedup(entry, baseline) == "invalid":
            cells.append(_SHOWN_ABOVE)
        else:
            if text not in notes:
                notes.append(text)
            cells.append(f"[{notes.index(text) + 1}]")
    return LossNotes(tuple(cells), tuple(f"[{number}] {note}" for number, note in enumerate(notes, start=1)))


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
    known = ((name, ms) for part, name in PARTS.items() if (ms := getattr(parts, part)) is not None)
    terms = " + ".join(f"{ms:,.{decimals}f} {name}" for name, ms in known)
    sign = "+" if parts.unaccounted >= 0 else "-"
    remainder = f" {sign} {abs(parts.unaccounted):,.{decimals}f} unaccounted" if parts.unaccounted else ""
    return wrap(f"Step time, {count_workers(row)} (ms): {parts.total:,.{decimals}f} total = {terms}{remainder}")


def format_step_times(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the step times of several rows as a table; no lines if nothing was measured, or if there is no room."""
    measured = [row for row in rows if row.parts.sum_ms is not None]
    if not measured or len(measured) > _MOST_ROWS:
        return ()
    table = step_parts(measured)
    names, *cells = zip(*table.rows, strict=True)
    columns = [Column("Step time (ms)\n", names, is_text=True)]
    columns += map(Column, map(_break_title, table.header[1:]), cells)
    is_complete = all(map(has_consistent_parts, measured))
    return (*lay_out(columns), *(() if is_complete else ("Parts that do not add up to the step are left out.",)))


def _break_title(title: str) -> str:
    """Return the title of a column in two lines."""
    if title == "unaccounted":
        return "un-\naccounted"
    return title.replace(" ", "\n", 1) if " " in title else f"{title}\n"


def _loss_column(losses: LossNotes) -> Column:
    return Column("loss vs. baseline" if _SHOWN_ABOVE in losses.cells else "loss", losses.cells)


def _build_time_columns(report: Report, entries: Sequence[Entry]) -> list[Column]:
    if not report.main.whole_training:
        return []
    start_s = report.main.time_to_first_step_s or 0.0
    return [Column("est. time", _cells(entries, lambda row: duration(training_s(row, start_s=start_s))), 3)]


def _format_speedup(entry: Entry) -> str:
    return "not measured" if isinstance(entry, Unmeasured) else speedup(entry)


def _cells(entries: Sequence[Entry], text: Callable[[Row | Predicted], str]) -> tuple[str, ...]:
    return tuple(_NONE if isinstance(entry, Unmeasured) else text(entry) for entry in entries)

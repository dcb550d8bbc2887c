"""The tables of a report as text, in the same words for the terminal, for Markdown and for the page."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import TypeVar

from pipeline.experiment.values import Frozen
from pipeline.protocol import estimates
from pipeline.protocol.numbers import Number
from pipeline.protocol.trial_result import Spread
from pipeline.report.numbers.forecast import Predicted
from pipeline.report.numbers.old_breakdown import PARTS, break_down, count_decimals
from pipeline.report.numbers.row import Row, Unmeasured
from pipeline.report.numbers.row_numbers import NUMBERS
from pipeline.report.text.ratios import ends_of, is_wide, value_of
from pipeline.report.text.row_names import count_workers, label_row, name_row
from pipeline.wording import duration, join_names

UNEVEN = 1.1
"""Factor from which the values of devices or ranks count as different."""

_SAME_LOSS: Mapping[str | None, str] = {None: "-", "yes": "same", "at first": "same early", "no": "differs"}
"""Agreement with the baseline's losses, see `Row.same_training`."""

Item = TypeVar("Item")
Column = tuple[str, Callable[[Item], str]]
"""Head of a column, and the text of an item's cell."""


class ReportTable(Frozen):
    """A table as text."""

    title: str = ""
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    emphasis: int | None = None
    """Index of the row that the result is about, shown in bold."""
    notes: tuple[str, ...] = ()
    """Lines below the table."""


class Straggler(Frozen):
    """A rank that the other ranks wait for."""

    rank: int
    node: str
    others_ms: float
    """Median step time of the other ranks."""
    ratio: float
    """Step time of the rank over ``others_ms``."""

    @classmethod
    def of(cls, row: Row) -> "Straggler | None":
        """Return the slowest rank if it was slower than the others in the same rounds, by more than `UNEVEN`."""
        paces = row.parts.ranks
        rounds = list(zip(*(pace.values for pace in paces), strict=True))
        if len(paces) < 2 or not rounds:
            return None
        rank = max(range(len(paces)), key=lambda rank: paces[rank].median)
        others = [median((*times[:rank], *times[rank + 1 :])) for times in rounds]
        ratio = estimates.ratio([(times[rank], other) for times, other in zip(rounds, others, strict=True)])
        if not ratio.is_clear or ratio.value <= UNEVEN:
            return None
        return cls(rank=rank, node=row.parts.nodes[rank], others_ms=median(others), ratio=ratio.value)


def results(entries: Sequence[Row | Unmeasured | Predicted], *, main: Row) -> ReportTable:
    """Build the table of throughput and speedup; an unmeasured cell has a row, too, and its reason below."""
    columns: list[Column[Row | Predicted]] = [
        ("configuration", label_row),
        ("devices", lambda row: row.devices),
        ("samples/s", lambda row: amount(row.samples_per_second.median)),
    ]
    if len(entries) > 1:
        columns += [
            ("speedup", _format_narrow_speedup),
            ("scaling efficiency", efficiency),
        ]
    rows = [entry for entry in entries if isinstance(entry, Row)]
    start_s = main.time_to_first_step_s or 0.0
    if main.whole_training:
        columns.append(("est. training time", lambda row: duration(training_s(row, start_s=start_s))))
    if any(row.same_training for row in rows):
        columns.append(("loss vs. baseline", _format_loss))
    unmeasured = [entry for entry in entries if isinstance(entry, Unmeasured)]
    return ReportTable(
        header=tuple(name for name, _ in columns),
        rows=tuple(_result(entry, columns) for entry in entries),
        emphasis=next((index for index, entry in enumerate(entries) if entry == main), None),
        notes=(
            *(f"{name_row(cell)} was not measured: {cell.reason.rstrip('.')}." for cell in unmeasured),
            *_doubts(rows),
            *_notes_on_time(rows, main=main),
        ),
    )


def training_s(row: Row | Predicted, *, start_s: float) -> float:
    """Return the seconds that a row's whole training takes at its throughput, with its start or else ``start_s``."""
    own = row.time_to_first_step_s
    return row.whole_training / row.samples_per_second.median + (start_s if own is None else own)


def _notes_on_time(rows: Sequence[Row], *, main: Row) -> Iterator[str]:
    """Yield what the estimated training time consists of, and from when on a slower start is recovered."""
    if not main.whole_training:
        return
    estimated = f"Estimated training time: {main.whole_training:,} samples at this throughput"
    if main.time_to_first_step_s is None:
        yield f"{estimated}. The startup was not measured; it, evaluation and checkpoints add to it."
        return
    starts = [start for row in rows if (start := row.time_to_first_step_s) is not None]
    startup = duration(starts[0]) if len(starts) == 1 else f"{duration(min(starts))} to {duration(max(starts))}"
    yield f"{estimated} plus {startup} startup. Evaluation and checkpoints add to it."
    base, rate_of_main = rows[0], main.samples_per_second.median
    later = main.time_to_first_step_s - (base.time_to_first_step_s or math.inf)
    if later > 0 and main.ratio is not None and main.ratio.is_clear and main.ratio.value > 1:
        recovered = later / (1 / base.samples_per_second.median - 1 / rate_of_main)
        if recovered > main.whole_training:
            steps = math.ceil(recovered / main.global_batch_size)
            yield (
                f"Startup with {count_workers(main)} takes {duration(later)} longer than with {count_workers(base)}. "
                f"The extra time is recovered after {steps:,} steps."
            )


def _doubts(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the reasons for showing an interval instead of a number."""
    wide = [name_row(row) for row in rows if row.ratio and row.ratio.size and is_wide(row.ratio)]
    if wide:
        yield (
            f"{join_names(wide)}: too noisy for a single number; the confidence interval is shown instead. "
            "Measure again on an idle machine."
        )
    if any(row.efficiency and row.efficiency > 1 for row in rows if name_row(row) not in wide):
        yield (
            "An efficiency above 100% is shown as an interval: it is noise, or a cache effect of the smaller "
            "per-worker batch."
        )


def step_parts(rows: Sequence[Row], predicted: Sequence[Predicted] = ()) -> ReportTable:
    """Build the step-time breakdown, with stragglers below; parts that don't add up to the step are left out."""
    shown: tuple[Row | Predicted, ...] = (*rows, *predicted)
    decimals = count_decimals(min(row.step_ms.median for row in shown))
    parts = {row.trial: break_down(row, decimals=decimals) for row in shown}

    def column(part: str) -> Callable[[Row | Predicted], str]:
        def format_part(row: Row | Predicted) -> str:
            value = getattr(parts[row.trial], part, None)
            return "-" if value is None else f"{value:,.{decimals}f}"

        return format_part

    titles = {**PARTS, "exposed": "exposed comm.", "unaccounted": "unaccounted"}
    columns: list[Column[Row | Predicted]] = [
        ("configuration", label_row),
        ("total", lambda row: f"{row.step_ms.median:,.{decimals}f}"),
        *((title, column(part)) for part, title in titles.items()),
    ]
    stragglers = [(row, found) for row in rows if (found := Straggler.of(row))]
    inconsistent = [row for row in rows if parts[row.trial] is None and row.parts.sum_ms is not None]
    unknown = [name_row(row) for row in rows if row.parts.sum_ms is None]
    notes = [
        f"{name_row(row)}: rank {found.rank} on {found.node} takes {found.ratio:.2f}x the time of the other ranks."
        for row, found in stragglers
    ]
    notes += [
        f"{name_row(row)}: the parts are left out. They add up to {amount(row.parts.sum_ms or 0.0)} ms, which does not "
        f"match the step of {amount(row.step_ms.median)} ms: the machine was busy with other work during one of the "
        "measurements."
        for row in inconsistent
    ]
    if unknown:
        notes.append(f"{join_names(unknown)}: the step-time breakdown could not be measured.")
    return from_columns("Step-time breakdown, ms", columns, shown, notes=notes)


def resources(rows: Sequence[Row], *, more: Sequence[Column[Row]] = ()) -> ReportTable:
    """Build the table of the numbers that have a title, as far as they were measured, with ``more`` columns.

    Trials that were measured inside another one have no row. Memory of weights, gradients and optimizer has a column if
    it differs between strategies.
    """
    numbers = [number for number in NUMBERS if number.title and any(number.value(row) is not None for row in rows)]
    rows = [row for row in rows if any(number.value(row) is not None for number in numbers)]
    columns: list[Column[Row]] = [("configuration", label_row)]
    columns += [(number.title, partial(format_number, number)) for number in numbers]
    columns += more
    held = [max(row.held.mb) for row in rows if row.held]
    if held and max(held) > UNEVEN * min(held):
        columns.insert(
            2, ("weights, gradients, optimizer, MiB", lambda row: low_to_high(row.held.mb if row.held else ()))
        )
    notes = [f"{name_row(row)}: {row.held.cut} are sharded across ranks." for row in rows if row.held and row.held.cut]
    return from_columns("Memory and startup", columns, rows, notes=notes)


def speedup(row: Row | Predicted) -> str:
    """Format the speedup with its interval, e.g. "1.90x (1.79x to 2.02x)"; only the interval if it is wide."""
    if (ratio := row.ratio) is None:
        return "-"
    if isinstance(row, Predicted):
        return value_of(ratio)
    if not ratio.size:
        return f"{value_of(ratio)} (no CI)"
    return ends_of(ratio) if is_wide(ratio) else f"{value_of(ratio)} ({ends_of(ratio)})"


def _format_narrow_speedup(row: Row | Predicted) -> str:
    """Format the speedup with its interval for a table of many columns, e.g. "1.90x (1.79-2.02)"."""
    if (ratio := row.ratio) is None or not ratio.size or is_wide(ratio):
        return speedup(row)
    return f"{value_of(ratio)} ({ends_of(ratio).replace('x to ', '-').removesuffix('x')})"


def efficiency(row: Row | Predicted) -> str:
    """Format the efficiency, e.g. "95%"; only its interval if that is wide, or the figure is above 1."""
    if (figure := row.efficiencies) is None:
        return "-"
    if is_wide(figure) or figure.value > 1:
        return f"{figure.low:.0%} to {figure.high:.0%}" if figure.high < 10 else f"{figure.low:.0%} to over 1,000%"
    return f"{figure.value:.0%}"


def amount(value: float) -> str:
    """Format three significant digits, or whole numbers with separators, e.g. "0.92" or "1,310"."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def rate(spread: Spread) -> str:
    """Format the figure of a throughput or of a step."""
    return amount(spread.median)


def low_to_high(values: Sequence[float]) -> str:
    """Format the highest of the devices' values, with the lowest if they differ by more than `UNEVEN`."""
    if not values:
        return "-"
    low, high = min(values), max(values)
    return f"{amount(low)} to {amount(high)}" if high > UNEVEN * low else amount(high)


def format_number(number: Number, row: Row) -> str:
    """Format a number of a row, or those of its devices."""
    found = number.of(row)
    if isinstance(found, Sequence):
        return low_to_high(found)
    return "-" if found is None else format(found, number.spec) if number.spec else amount(found)


def from_columns(
    title: str, columns: Sequence[Column[Item]], items: Sequence[Item], *, notes: Sequence[str] = ()
) -> ReportTable:
    """Build a table with a row for each item."""
    cells = tuple(tuple(text(item) for _, text in columns) for item in items)
    return ReportTable(title=title, header=tuple(name for name, _ in columns), rows=cells, notes=tuple(notes))


def _format_loss(row: Row | Predicted) -> str:
    return _SAME_LOSS[row.same_training if isinstance(row, Row) else None]


def _result(entry: Row | Unmeasured | Predicted, columns: Sequence[Column[Row | Predicted]]) -> tuple[str, ...]:
    if not isinstance(entry, Unmeasured):
        return tuple(text(entry) for _, text in columns)
    return (name_row(entry), *("not measured" if name == "speedup" else "-" for name, _ in columns[1:]))

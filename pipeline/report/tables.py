"""The tables of a report as text, in the same words for the terminal, for Markdown and for the page."""

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import TypeVar

from pipeline.config.values import Frozen
from pipeline.protocol.estimates import is_wide, noise
from pipeline.protocol.trial import Spread
from pipeline.report import Row, Unmeasured

SHORT_MS = 5.0
"""Step time below which sending metrics to the driver takes more than a few percent."""
UNEVEN = 1.1
"""Factor from which the values of devices or ranks count as different."""

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
        """Return the slowest rank if it was slower than the other ranks by more than `UNEVEN`, in every round."""
        paces = row.parts.ranks
        if len(paces) < 2:
            return None
        rank = max(range(len(paces)), key=lambda rank: paces[rank].median)
        others = [pace for other, pace in enumerate(paces) if other != rank]
        usual = median(pace.median for pace in others)
        if usual * UNEVEN >= paces[rank].median or paces[rank].low <= median(pace.high for pace in others):
            return None
        return cls(rank=rank, node=row.parts.nodes[rank], others_ms=usual, ratio=paces[rank].median / usual)


def results(entries: Sequence[Row | Unmeasured], *, main: Row, has_intervals: bool) -> ReportTable:
    """Build the table of throughput and speedup; an unmeasured cell has a row, too, and its reason below."""
    columns: list[Column[Row]] = [
        ("strategy", lambda row: row.title),
        ("devices", lambda row: row.devices),
        ("samples/s", lambda row: with_spread(row.samples_per_second)),
        ("speedup", lambda row: speedup(row, has_interval=has_intervals)),
        ("efficiency", efficiency),
    ]
    rows = [entry for entry in entries if isinstance(entry, Row)]
    if any(row.same_training for row in rows):
        columns.append(("same loss", lambda row: row.same_training or "-"))
    unmeasured = [entry for entry in entries if isinstance(entry, Unmeasured)]
    return ReportTable(
        header=tuple(name for name, _ in columns),
        rows=tuple(_result(entry, columns) for entry in entries),
        emphasis=next((index for index, entry in enumerate(entries) if entry == main), None),
        notes=(*(f"{cell.title} was not measured: {cell.reason.rstrip('.')}." for cell in unmeasured), *_doubts(rows)),
    )


def _doubts(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the reasons for showing a range in place of a figure."""
    wide = [row.title for row in rows if is_wide(row.samples_per_second) or (row.ratio and is_wide(row.ratio))]
    if wide:
        yield (
            f"{_listed(wide)}: repeated measurements differ by more than the figure itself, so only their range is "
            "shown. The machine was busy with other work; measure again when it is idle."
        )
    if any(row.efficiency and row.efficiency > 1 for row in rows if row.title not in wide):
        yield (
            "An efficiency above 100% comes from noise or from smaller batches, which fit the caches better, so only "
            "its range is shown."
        )


def step_parts(rows: Sequence[Row]) -> ReportTable:
    """Build the table of the parts of a step, with stragglers below."""
    shortest = min(row.step_ms.median for row in rows)
    decimals = 0 if shortest >= 1000 else 1 if shortest >= 10 else 2

    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:,.{decimals}f}"

    columns: list[Column[Row]] = [
        ("strategy", lambda row: row.title),
        ("step", lambda row: with_spread(row.step_ms, decimals=decimals)),
        ("compute", lambda row: shown(row.parts.compute_ms)),
        ("exposed comm.", lambda row: shown(row.parts.exposed_communication_ms)),
        ("data wait", lambda row: shown(row.parts.data_wait_ms)),
        ("rest", lambda row: shown(row.parts.rest_ms)),
        ("sum", lambda row: shown(row.parts.sum_ms)),
    ]
    stragglers = [(row, found) for row in rows if (found := Straggler.of(row))]
    missed = [row for row in rows if row.unexplained_ms]
    unknown = [row.title for row in rows if row.parts.sum_ms is None]
    notes = [
        f"{row.title}: rank {found.rank} on {found.node} takes {found.ratio:.2f}x the time of the other ranks."
        for row, found in stragglers
    ]
    notes += [
        f"{row.title}: the parts add up to {amount(row.parts.sum_ms or 0.0)} ms, {amount(abs(row.unexplained_ms))} ms "
        f"{'less' if row.unexplained_ms > 0 else 'more'} than a step, beyond the noise: {_why(row)}."
        for row in missed
    ]
    if unknown:
        notes.append(f"{_listed(unknown)}: the parts of a step could not be measured.")
    return from_columns("Where a step's time goes, ms", columns, rows, notes=notes)


def _why(row: Row) -> str:
    """Explain a difference between a step and the sum of its parts."""
    busy = "the machine was busy with other work, e.g. loader processes, during training or while they were measured"
    is_short = row.unexplained_ms > 0 and row.step_ms.median < SHORT_MS
    return f"sending metrics takes a share of a step this short, or {busy}" if is_short else busy


def resources(rows: Sequence[Row]) -> ReportTable:
    """Build the table of memory, time to the first step and, if measured, GPU utilization.

    Memory of weights, gradients and optimizer has a column if it differs between strategies.
    """
    columns: list[Column[Row]] = [
        ("strategy", lambda row: row.title),
        ("peak memory per device, MB", lambda row: low_to_high(row.peak_memory_mb)),
        ("time to first step, s", lambda row: _seconds(row.time_to_first_step_s)),
    ]
    if any(row.gpu_utilization for row in rows):
        columns.append(("GPU utilization, %", lambda row: low_to_high(row.gpu_utilization)))
    held = [max(row.held.mb) for row in rows if row.held]
    if held and max(held) > UNEVEN * min(held):
        columns.insert(
            2, ("weights, gradients, optimizer, MB", lambda row: low_to_high(row.held.mb if row.held else ()))
        )
    notes = [f"{row.title}: each rank holds a part of {row.held.cut}." for row in rows if row.held and row.held.cut]
    return from_columns("Memory and start", columns, rows, notes=notes)


def speedup(row: Row, *, has_interval: bool) -> str:
    """Format the speedup, e.g. "1.90x" or "1.90x (1.79-2.02)"."""
    if row.role == "baseline":
        return "baseline"
    if (ratio := row.ratio) is None:
        return "-"
    if has_interval and not is_wide(ratio):
        return f"{ratio.median:.2f}x ({ratio.low:.2f}-{ratio.high:.2f})"
    return times(ratio, has_interval=False)


def efficiency(row: Row) -> str:
    """Format the efficiency, e.g. "95%"; only its range if that is larger than the figure, or the figure is above 1."""
    if (figure := row.efficiencies) is None:
        return "-"
    if is_wide(figure) or figure.median > 1:
        return f"{figure.low:.0%} to {figure.high:.0%}"
    return f"{figure.median:.0%}"


def amount(value: float) -> str:
    """Format three significant digits, or whole numbers with separators, e.g. "0.92" or "1,310"."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def rate(spread: Spread) -> str:
    """Format the median, or if the range is larger than the median the range, e.g. "120 to 980"."""
    return f"{amount(spread.low)} to {amount(spread.high)}" if is_wide(spread) else amount(spread.median)


def times(ratio: Spread, *, has_interval: bool = True) -> str:
    """Format a ratio with its range, e.g. "1.90x (1.79x to 2.02x)"; only the range if it is larger than the ratio."""
    interval = f"{ratio.low:.2f}x to {ratio.high:.2f}x"
    if is_wide(ratio):
        return interval
    return f"{ratio.median:.2f}x ({interval})" if has_interval and ratio.windows > 1 else f"{ratio.median:.2f}x"


def with_spread(spread: Spread, *, decimals: int | None = None) -> str:
    """Format the median and half the range, e.g. "375 ± 14"; a single window has no range.

    If the range is larger than the median, it is shown alone, e.g. "120 to 980".
    """

    def shown(value: float) -> str:
        return amount(value) if decimals is None else f"{value:,.{decimals}f}"

    if is_wide(spread):
        return f"{shown(spread.low)} to {shown(spread.high)}"
    half = noise(spread)
    rounded = round(half) if decimals is None and abs(spread.median) >= 100 else half
    return shown(spread.median) if spread.windows < 2 else f"{shown(spread.median)} ± {shown(rounded)}"


def low_to_high(values: Sequence[float]) -> str:
    """Format the highest of the devices' values, with the lowest if they differ by more than `UNEVEN`."""
    if not values:
        return "-"
    low, high = min(values), max(values)
    return f"{amount(low)} to {amount(high)}" if high > UNEVEN * low else amount(high)


def from_columns(
    title: str, columns: Sequence[Column[Item]], items: Sequence[Item], *, notes: Sequence[str] = ()
) -> ReportTable:
    """Build a table with a row for each item."""
    cells = tuple(tuple(text(item) for _, text in columns) for item in items)
    return ReportTable(title=title, header=tuple(name for name, _ in columns), rows=cells, notes=tuple(notes))


def _result(entry: Row | Unmeasured, columns: Sequence[Column[Row]]) -> tuple[str, ...]:
    if isinstance(entry, Row):
        return tuple(text(entry) for _, text in columns)
    return (entry.title, *("not measured" if name == "speedup" else "-" for name, _ in columns[1:]))


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"

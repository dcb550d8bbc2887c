"""The tables of a report as text: the same words in the terminal, in Markdown and on the page."""

from collections.abc import Callable, Sequence
from statistics import median

from pipeline.config.values import Frozen
from pipeline.contract import Spread
from pipeline.speedup import Row, Unmeasured

UNEVEN = 1.1
"""Devices or ranks that differ by a smaller factor count as equal."""

Column = tuple[str, Callable[[Row], str]]


class Table(Frozen):
    """A table as text."""

    title: str = ""
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    emphasis: int | None = None
    """Index of the row that the result is about."""
    notes: tuple[str, ...] = ()
    """What stands below it."""


class Straggler(Frozen):
    """The rank that the others wait for."""

    rank: int
    node: str
    ratio: float
    """Its time for a step over the median of the others'."""

    @classmethod
    def of(cls, row: Row) -> "Straggler | None":
        """The slowest rank, if it is slower than the others by more than `UNEVEN`."""
        times = row.parts.ranks_ms
        if len(times) < 2:
            return None
        rank = times.index(max(times))
        ratio = times[rank] / median([*times[:rank], *times[rank + 1 :]])
        return cls(rank=rank, node=row.parts.nodes[rank], ratio=ratio) if ratio > UNEVEN else None


def results(entries: Sequence[Row | Unmeasured], *, main: Row, has_intervals: bool) -> Table:
    """Throughput and speedup; a cell without figures has a row, too, and its reason below."""
    columns: list[Column] = [
        ("strategy", lambda row: row.title),
        ("devices", lambda row: row.devices),
        ("samples/s", lambda row: with_spread(row.samples_per_second)),
        ("speedup", lambda row: speedup(row, has_interval=has_intervals)),
        ("efficiency", lambda row: "-" if row.efficiency is None else f"{row.efficiency:.0%}"),
    ]
    rows = [entry for entry in entries if isinstance(entry, Row)]
    if any(row.same_training for row in rows):
        columns.append(("same loss", lambda row: row.same_training or "-"))
    unmeasured = [entry for entry in entries if isinstance(entry, Unmeasured)]
    return Table(
        header=tuple(name for name, _ in columns),
        rows=tuple(_result(entry, columns) for entry in entries),
        emphasis=next((index for index, entry in enumerate(entries) if entry == main), None),
        notes=tuple(f"{cell.title} is not measured: {cell.reason.rstrip('.')}." for cell in unmeasured),
    )


def step_parts(rows: Sequence[Row]) -> Table:
    """Where the time of a step goes, with the ranks that others wait for below."""
    shortest = min(row.step_ms.median for row in rows)
    decimals = 0 if shortest >= 1000 else 1 if shortest >= 10 else 2

    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:,.{decimals}f}"

    columns: list[Column] = [
        ("strategy", lambda row: row.title),
        ("step", lambda row: with_spread(row.step_ms, decimals=decimals)),
        ("compute", lambda row: shown(row.parts.compute_ms)),
        ("exposed comm.", lambda row: shown(row.parts.exposed_communication_ms)),
        ("data wait", lambda row: shown(row.parts.data_wait_ms)),
        ("rest", lambda row: shown(row.parts.rest_ms)),
        ("sum", lambda row: shown(row.parts.sum_ms)),
    ]
    stragglers = [(row, found) for row in rows if (found := Straggler.of(row))]
    notes = [
        f"{row.title}: rank {found.rank} on {found.node} takes {found.ratio:.2f}x the time of the other ranks."
        for row, found in stragglers
    ]
    return _table("Where a step's time goes, ms", columns, rows, notes=notes)


def resources(rows: Sequence[Row]) -> Table:
    """Memory, time to the first step and, where it was measured, GPU utilization.

    What ranks hold of the model stands there if it is not the same for all strategies.
    """
    columns: list[Column] = [
        ("strategy", lambda row: row.title),
        ("peak memory per device, MB", lambda row: low_to_high(row.peak_memory_mb)),
        ("first step after, s", lambda row: _seconds(row.time_to_first_step_s)),
    ]
    if any(row.gpu_utilization for row in rows):
        columns.append(("GPU utilization, %", lambda row: low_to_high(row.gpu_utilization)))
    held = [max(row.held.mb) for row in rows if row.held]
    if held and max(held) > UNEVEN * min(held):
        columns.insert(
            2, ("weights, gradients, optimizer, MB", lambda row: low_to_high(row.held.mb if row.held else ()))
        )
    notes = [f"{row.title}: each rank holds a part of {row.held.cut}." for row in rows if row.held and row.held.cut]
    return _table("Memory and start", columns, rows, notes=notes)


def speedup(row: Row, *, has_interval: bool) -> str:
    """The speedup as text, e.g. "1.90x" or "1.90x (1.79-2.02)"."""
    if row.role == "baseline":
        return "baseline"
    if row.speedup is None:
        return "-"
    return f"{row.speedup:.2f}x" + (f" ({row.speedup_low:.2f}-{row.speedup_high:.2f})" if has_interval else "")


def amount(value: float) -> str:
    """Three significant digits, or whole numbers with separators, e.g. "0.92" or "1,310"."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def with_spread(spread: Spread, *, decimals: int | None = None) -> str:
    """The median and half the range, e.g. "375 ± 14"; a single window has no range."""

    def shown(value: float) -> str:
        return amount(value) if decimals is None else f"{value:,.{decimals}f}"

    half = (spread.high - spread.low) / 2
    rounded = round(half) if decimals is None and abs(spread.median) >= 100 else half
    return shown(spread.median) if spread.windows < 2 else f"{shown(spread.median)} ± {shown(rounded)}"


def low_to_high(values: Sequence[float]) -> str:
    """The highest of the devices' values; also the lowest, if they are uneven."""
    if not values:
        return "-"
    low, high = min(values), max(values)
    return f"{amount(low)} to {amount(high)}" if high > UNEVEN * low else amount(high)


def _table(title: str, columns: Sequence[Column], rows: Sequence[Row], *, notes: Sequence[str] = ()) -> Table:
    cells = tuple(tuple(text(row) for _, text in columns) for row in rows)
    return Table(title=title, header=tuple(name for name, _ in columns), rows=cells, notes=tuple(notes))


def _result(entry: Row | Unmeasured, columns: Sequence[Column]) -> tuple[str, ...]:
    if isinstance(entry, Row):
        return tuple(text(entry) for _, text in columns)
    return (entry.title, *("not measured" if name == "speedup" else "-" for name, _ in columns[1:]))


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"

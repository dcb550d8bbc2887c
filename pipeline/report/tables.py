"""The tables of a report as text: the same words in the terminal, in Markdown and on the page."""

from collections.abc import Callable, Iterator, Sequence
from statistics import median

from pipeline.config.values import Frozen
from pipeline.protocol.estimates import is_wide, noise
from pipeline.protocol.trial import Spread
from pipeline.report import Row, Unmeasured

SHORT_MS = 5.0
"""Of steps that are shorter, reports to the driver are more than a few percent."""
UNEVEN = 1.1
"""Devices or ranks that differ by a smaller factor count as equal."""

Column = tuple[str, Callable[[Row], str]]


class ReportTable(Frozen):
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
    others_ms: float
    """What the others take for a step, in the median."""
    ratio: float
    """Its time for a step over theirs."""

    @classmethod
    def of(cls, row: Row) -> "Straggler | None":
        """The slowest rank, if it is slower than the others by more than `UNEVEN`, and was in every round."""
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
    """Throughput and speedup; a cell without figures has a row, too, and its reason below."""
    columns: list[Column] = [
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
        notes=(*(f"{cell.title} is not measured: {cell.reason.rstrip('.')}." for cell in unmeasured), *_doubts(rows)),
    )


def _doubts(rows: Sequence[Row]) -> Iterator[str]:
    """Why a range stands where a figure is expected."""
    wide = [row.title for row in rows if is_wide(row.samples_per_second) or (row.ratio and is_wide(row.ratio))]
    if wide:
        yield (
            f"{_listed(wide)}: measurements of the same differ by more than the figure, so only their range is shown. "
            "The machine was busy with other work; measure again when it is quiet."
        )
    if any(row.efficiency and row.efficiency > 1 for row in rows if row.title not in wide):
        yield (
            "An efficiency above 100% is not what parallel workers gain: it is noise, or smaller shares fit the caches "
            "better, so only its range is shown."
        )


def step_parts(rows: Sequence[Row]) -> ReportTable:
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
    return _table("Where a step's time goes, ms", columns, rows, notes=notes)


def _why(row: Row) -> str:
    """What makes the parts miss the step."""
    busy = (
        "the machine was busy with other work, loader processes among it, in the training or while they were measured"
    )
    is_short = row.unexplained_ms > 0 and row.step_ms.median < SHORT_MS
    return f"reports take a share of so short a step, or {busy}" if is_short else busy


def resources(rows: Sequence[Row]) -> ReportTable:
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
    if (ratio := row.ratio) is None:
        return "-"
    if has_interval and not is_wide(ratio):
        return f"{ratio.median:.2f}x ({ratio.low:.2f}-{ratio.high:.2f})"
    return times(ratio, has_interval=False)


def efficiency(row: Row) -> str:
    """The efficiency as text, e.g. "95%"; its range where that is larger than the figure, or the figure is above 1."""
    if (figure := row.efficiencies) is None:
        return "-"
    if is_wide(figure) or figure.median > 1:
        return f"{figure.low:.0%} to {figure.high:.0%}"
    return f"{figure.median:.0%}"


def amount(value: float) -> str:
    """Three significant digits, or whole numbers with separators, e.g. "0.92" or "1,310"."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def rate(spread: Spread) -> str:
    """The figure; where its range is larger than itself, the range, e.g. "120 to 980"."""
    return f"{amount(spread.low)} to {amount(spread.high)}" if is_wide(spread) else amount(spread.median)


def times(ratio: Spread, *, has_interval: bool = True) -> str:
    """A ratio and its range, e.g. "1.90x (1.79x to 2.02x)"; the range alone where it is larger than the ratio."""
    interval = f"{ratio.low:.2f}x to {ratio.high:.2f}x"
    if is_wide(ratio):
        return interval
    return f"{ratio.median:.2f}x ({interval})" if has_interval and ratio.windows > 1 else f"{ratio.median:.2f}x"


def with_spread(spread: Spread, *, decimals: int | None = None) -> str:
    """The figure and half the range, e.g. "375 ± 14"; a single window has no range.

    Where the range is larger than the figure, the range alone, e.g. "120 to 980".
    """

    def shown(value: float) -> str:
        return amount(value) if decimals is None else f"{value:,.{decimals}f}"

    if is_wide(spread):
        return f"{shown(spread.low)} to {shown(spread.high)}"
    half = noise(spread)
    rounded = round(half) if decimals is None and abs(spread.median) >= 100 else half
    return shown(spread.median) if spread.windows < 2 else f"{shown(spread.median)} ± {shown(rounded)}"


def low_to_high(values: Sequence[float]) -> str:
    """The highest of the devices' values; also the lowest, if they are uneven."""
    if not values:
        return "-"
    low, high = min(values), max(values)
    return f"{amount(low)} to {amount(high)}" if high > UNEVEN * low else amount(high)


def _table(title: str, columns: Sequence[Column], rows: Sequence[Row], *, notes: Sequence[str] = ()) -> ReportTable:
    cells = tuple(tuple(text(row) for _, text in columns) for row in rows)
    return ReportTable(title=title, header=tuple(name for name, _ in columns), rows=cells, notes=tuple(notes))


def _result(entry: Row | Unmeasured, columns: Sequence[Column]) -> tuple[str, ...]:
    if isinstance(entry, Row):
        return tuple(text(entry) for _, text in columns)
    return (entry.title, *("not measured" if name == "speedup" else "-" for name, _ in columns[1:]))


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"

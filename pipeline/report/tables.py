"""The tables of a report as text, in the same words for the terminal, for Markdown and for the page."""

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import TypeVar

from pipeline.config.values import Frozen
from pipeline.protocol import estimates
from pipeline.protocol.trial_result import Spread
from pipeline.report import Row, Unmeasured, is_clear
from pipeline.report.ratios import is_wide, times
from pipeline.wording import duration

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
        """Return the slowest rank if it was slower than the others in the same rounds, by more than `UNEVEN`."""
        paces = row.parts.ranks
        rounds = list(zip(*(pace.values for pace in paces), strict=True))
        if len(paces) < 2 or not rounds:
            return None
        rank = max(range(len(paces)), key=lambda rank: paces[rank].median)
        others = [median((*times[:rank], *times[rank + 1 :])) for times in rounds]
        ratio = estimates.ratio([(times[rank], other) for times, other in zip(rounds, others, strict=True)])
        if not is_clear(ratio) or ratio.value <= UNEVEN:
            return None
        return cls(rank=rank, node=row.parts.nodes[rank], others_ms=median(others), ratio=ratio.value)


def results(entries: Sequence[Row | Unmeasured], *, main: Row, has_intervals: bool) -> ReportTable:
    """Build the table of throughput and speedup; an unmeasured cell has a row, too, and its reason below."""
    columns: list[Column[Row]] = [
        ("strategy", lambda row: row.title),
        ("devices", lambda row: row.devices),
        ("samples/s", lambda row: amount(row.samples_per_second.median)),
    ]
    if len(entries) > 1:
        columns += [("speedup", lambda row: speedup(row, has_interval=has_intervals)), ("efficiency", efficiency)]
    rows = [entry for entry in entries if isinstance(entry, Row)]
    start_s = main.time_to_first_step_s or 0.0
    if main.whole_training:
        columns.append(("this training", lambda row: duration(training_s(row, start_s=start_s))))
    if any(row.same_training for row in rows):
        columns.append(("same loss", lambda row: row.same_training or "-"))
    unmeasured = [entry for entry in entries if isinstance(entry, Unmeasured)]
    return ReportTable(
        header=tuple(name for name, _ in columns),
        rows=tuple(_result(entry, columns) for entry in entries),
        emphasis=next((index for index, entry in enumerate(entries) if entry == main), None),
        notes=(
            *(f"{cell.title} was not measured: {cell.reason.rstrip('.')}." for cell in unmeasured),
            *_doubts(rows),
            *_of_this_training(rows, main=main),
        ),
    )


def training_s(row: Row, *, start_s: float) -> float:
    """Return the seconds that a row's whole training takes at its throughput, with its start or else ``start_s``."""
    own = row.time_to_first_step_s
    return row.whole_training / row.samples_per_second.median + (start_s if own is None else own)


def _of_this_training(rows: Sequence[Row], *, main: Row) -> Iterator[str]:
    """Yield what the column "this training" consists of, and from when on a slower start pays."""
    if not main.whole_training:
        return
    if main.time_to_first_step_s is None:
        yield (
            f"This training: the time of {main.whole_training:,} samples, without the start, which was not measured; "
            "evaluation and checkpoints come on top."
        )
        return
    starts = [start for row in rows if (start := row.time_to_first_step_s) is not None]
    waits = duration(starts[0]) if len(starts) == 1 else f"{duration(min(starts))} to {duration(max(starts))}"
    yield (
        f"This training: the time of {main.whole_training:,} samples, with {waits} until the first step; evaluation "
        "and checkpoints come on top."
    )
    base, own = rows[0], main.samples_per_second.median
    later = main.time_to_first_step_s - (base.time_to_first_step_s or math.inf)
    if later > 0 and main.ratio is not None and is_clear(main.ratio) and main.ratio.value > 1:
        pays = later / (1 / base.samples_per_second.median - 1 / own)
        if pays > main.whole_training:
            yield (
                f"{main.title} starts {duration(later)} later than {base.title}, which eats its gain: it pays from "
                f"{math.ceil(pays / main.global_batch_size):,} steps on."
            )


def _doubts(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the reasons for showing an interval in place of a figure."""
    wide = [row.title for row in rows if row.ratio and is_wide(row.ratio)]
    if wide:
        yield (
            f"{_listed(wide)}: the interval is as wide as the figure itself, so only the interval is shown. The "
            "machine was busy with other work; measure again when it is idle."
        )
    if any(row.efficiency and row.efficiency > 1 for row in rows if row.title not in wide):
        yield (
            "An efficiency above 100% comes from noise or from smaller batches, which fit the caches better, so only "
            "its interval is shown."
        )


def step_parts(rows: Sequence[Row]) -> ReportTable:
    """Build the table of the parts of a step, with stragglers below."""
    shortest = min(row.step_ms.median for row in rows)
    decimals = 0 if shortest >= 1000 else 1 if shortest >= 10 else 2

    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:,.{decimals}f}"

    columns: list[Column[Row]] = [
        ("strategy", lambda row: row.title),
        ("step", lambda row: shown(row.step_ms.median)),
        ("compute", lambda row: shown(row.parts.compute_ms)),
        ("waiting for gradients", lambda row: shown(row.parts.exposed_communication_ms)),
        ("data wait", lambda row: shown(row.parts.data_wait_ms)),
        ("optimizer, other", lambda row: shown(row.parts.rest_ms)),
        ("parts added up", lambda row: shown(row.parts.sum_ms)),
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


def resources(rows: Sequence[Row], *, more: Sequence[Column[Row]] = ()) -> ReportTable:
    """Build the table of memory, time to the first step and, if measured, GPU utilization, with ``more`` columns.

    Trials that were measured inside another one have no row. Memory of weights, gradients and optimizer has a column if
    it differs between strategies.
    """
    rows = [row for row in rows if row.peak_memory_mb or row.gpu_utilization or row.time_to_first_step_s is not None]
    columns: list[Column[Row]] = [
        ("strategy", lambda row: row.title),
        ("peak memory per device, MB", lambda row: low_to_high(row.peak_memory_mb)),
        ("time to first step, s", lambda row: _seconds(row.time_to_first_step_s)),
    ]
    if any(row.gpu_utilization for row in rows):
        columns.append(("GPU utilization, %", lambda row: low_to_high(row.gpu_utilization)))
    columns += more
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
        return f"{ratio.value:.2f}x ({ratio.low:.2f}-{ratio.high:.2f})"
    return times(ratio)


def efficiency(row: Row) -> str:
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


def placed(row: Row) -> str:
    """Return title and devices of a row, e.g. "single on 2 cores"."""
    return f"{row.title.removesuffix(f', {row.devices}')} on {row.devices}"


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

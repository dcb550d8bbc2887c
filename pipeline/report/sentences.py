"""The result of a report in sentences."""

from collections.abc import Sequence

from pipeline.protocol.estimates import is_wide
from pipeline.report import Advice, Row
from pipeline.report.tables import efficiency, low_to_high, rate


def best(rows: Sequence[Row]) -> Row:
    """The row that the result is about.

    The training of a run; of a comparison, the cell with the highest speedup, or else the baseline. Cells of weak
    scaling come second: they train something else.
    """
    if rows[-1].role == "main":
        return rows[-1]
    cells = [row for row in rows if row.role == "cell"]
    return max(cells, key=_merit, default=rows[0])


def headline(rows: Sequence[Row]) -> str:
    """The result in one sentence."""
    main, baseline = best(rows), rows[0]
    does = f"{main.title} does {rate(main.samples_per_second)} samples/s"
    if main.ratio is None:
        return f"{does}; no speedup is claimed."
    interval = f"{main.ratio.low:.2f}x to {main.ratio.high:.2f}x"
    throughput = f"the throughput of {baseline.title}"
    times = f"{interval} {throughput}" if is_wide(main.ratio) else f"{main.speedup:.2f}x {throughput} ({interval})"
    losses = ", with other losses" if main.same_training == "no" else ""
    return f"{_rank(main, rows)}{does}: {times}, scaling efficiency {efficiency(main)}{losses}."


def outcome(row: Row) -> str:
    """What a training reached and what it took."""
    reached = {name: value for name, value in row.metrics.items() if name.startswith("validation/")}
    reached = reached or {name: value for name, value in row.metrics.items() if name == "train/loss"}
    parts = [f"{name} {value:.4g}" for name, value in reached.items()]
    if row.time_to_first_step_s is not None:
        parts.append(f"first step after {row.time_to_first_step_s:.1f} s")
    if row.compile_s is not None:
        parts.append(f"compiled in {row.compile_s:.1f} s")
    if row.peak_memory_mb:
        parts.append(f"peak memory {low_to_high(row.peak_memory_mb)} MB")
    return ", ".join(parts)


def advised(advice: Sequence[Advice]) -> tuple[str, ...]:
    """A numbered line for each: what was measured, then what to do."""
    return tuple(f"{number}. {each.reason.rstrip('.')}: {each.change}" for number, each in enumerate(advice, start=1))


def _merit(row: Row) -> tuple[bool, bool, float]:
    return row.speedup is not None, row.scaling == "strong", row.speedup or 0.0


def _rank(main: Row, rows: Sequence[Row]) -> str:
    """How the best cell of a comparison stands among all, for the beginning of a sentence."""
    if main.role != "cell":
        return ""
    if main.speedup is not None and not main.is_resolved:
        return f"Nothing is clearly faster than {rows[0].title}. "
    if main.speedup is not None and main.speedup <= 1:
        return f"Nothing is faster than {rows[0].title}. "
    if sum(row.role == "cell" for row in rows) == 1:
        return ""
    others = any(row.scaling != main.scaling for row in rows if row.role == "cell")
    return f"Fastest with {main.scaling} scaling: " if others else "Fastest: "

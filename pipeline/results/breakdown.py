"""Step-time breakdown: the parts of a step, whether they add up to it, and which of them costs the speedup."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from pipeline.protocol import estimates
from pipeline.results import texts
from pipeline.results.record import Fact, Table, format_fact
from pipeline.results.speedup import Row
from pipeline.wording import join_names

PARTS: Mapping[str, str] = {
    "compute_ms": "compute",
    "exposed_communication_ms": "exposed communication",
    "data_wait_ms": "data loading",
    "rest_ms": "optimizer and other",
}
"""The parts in words, by their keys, in the order of a step."""
_LOST = {"compute_ms": "compute", "exposed_communication_ms": "exposed", "data_wait_ms": "data", "rest_ms": "rest"}
_HEADS = {"exposed_communication_ms": "exposed comm."}
_LEAST_NOISE = 0.1  # Best accuracy at which the parts can be measured, relative to the step
_MOST_NOISE = 0.25
"""Fraction of a step that its parts may miss or exceed; beyond it they say nothing, however noisy they are."""
_EXPLAINED = 0.6  # Fraction of the lost time from which the parts that are named explain it
UNEVEN = 1.1  # Factor from which the times of ranks count as different


class Straggler(NamedTuple):
    """A rank that the other ranks wait for."""

    rank: int
    node: str
    others_ms: float  # Median step time of the other ranks
    ratio: float  # Step time of the rank over ``others_ms``


def parts_of(row: Row) -> dict[str, float]:
    """Return the milliseconds of each known part by its key; empty if the parts were not measured."""
    if row.result.parts.sum_ms is None:
        return {}
    known = {key: getattr(row.result.parts, key) for key in PARTS}
    return {key: ms for key, ms in known.items() if ms is not None}


def noise_ms(row: Row) -> float:
    """Return the milliseconds by which noise alone can separate the step from the sum of its parts."""
    held = row.result.parts.held_ms
    own = estimates.half_range(row.result.step_ms)
    return max(own + (estimates.half_range(held) if held is not None else 0.0), _LEAST_NOISE * row.step_ms)


def adds_up(row: Row) -> bool:
    """Return True if the parts of a step were measured, and add up to it within the noise."""
    if (total := row.result.parts.sum_ms) is None or max(parts_of(row).values()) > row.step_ms:
        return False
    return abs(row.step_ms - total) <= min(noise_ms(row), _MOST_NOISE * row.step_ms)


def describe_step(row: Row) -> str:
    """Return the time of a row's step with its parts: as a sum if they add up to it, else each with its range."""
    parts, step, name = parts_of(row), row.result.step_ms, row.short_name
    if not parts:
        return texts.STEP["unknown"].format(name=name, total=format_ms(step.median))
    decimals = 0 if step.median >= 1000 else 1 if step.median >= 10 else 2
    rounded = {key: round(ms, decimals) for key, ms in parts.items()}
    left = round(round(step.median, decimals) - sum(rounded.values()), decimals)
    shown = {PARTS[key]: f"{ms:,.{decimals}f}" for key, ms in rounded.items()}
    state = "noisy" if not adds_up(row) else "sum" if left >= 0 else "about"
    if state == "sum" and left:
        shown["unaccounted"] = f"{left:,.{decimals}f}"
    if state == "noisy":
        for key, (low, high) in row.result.parts.ranges.items():
            shown[PARTS[key]] = f"{shown[PARTS[key]]} ({low:,.{decimals}f} to {high:,.{decimals}f})"
    joined = (" + " if state == "sum" else ", ").join(f"{ms} {part}" for part, ms in shown.items())
    ends = {"low": f"{step.low:,.{decimals}f}", "high": f"{step.high:,.{decimals}f}"}
    return texts.STEP[state].format(name=name, total=f"{step.median:,.{decimals}f}", parts=joined, **ends)


def explain_lost_time(row: Row, other: Row) -> str:
    """Return the parts that make a row's step longer than an even share of another row's step, the longest first."""
    parts, even = parts_of(row), other.device_count / row.device_count
    fields = {"name": row.short_name, "base": other.short_name, "step": format_ms(row.step_ms)}
    if not parts:
        return ""
    if not adds_up(row):
        return f"{texts.LOST['unclear'].format(**fields)}."
    shares = {key: even * ms for key, ms in parts_of(other).items()} or {"compute_ms": even * other.step_ms}
    lost = {key: ms - shares.get(key, 0.0) for key, ms in parts.items() if ms > shares.get(key, 0.0)}
    sentences, explained = list[str](), 0.0
    for key in sorted(lost, key=lambda key: -lost[key])[:2]:
        if explained < _EXPLAINED * sum(lost.values()):
            explained += lost[key]
            own = {"ms": f"{format_ms(parts[key])} ms", "even": f"{format_ms(shares.get(key, 0.0))} ms"}
            sentences.append(f"{texts.LOST[_LOST[key]].format(**fields, **own)}.")
    return " ".join(sentences)


def format_ms(ms: float) -> str:
    """Format milliseconds."""
    return format_fact(Fact(key="ms", value=ms, unit="ms"))


def find_straggler(row: Row) -> Straggler | None:
    """Return the slowest rank if it was slower than the others in the same rounds, by more than `UNEVEN`."""
    paces = row.result.parts.ranks
    rounds = list(zip(*(pace.values for pace in paces), strict=True))
    if len(paces) < 2 or not rounds:
        return None
    rank = max(range(len(paces)), key=lambda rank: paces[rank].median)
    others = [median((*times[:rank], *times[rank + 1 :])) for times in rounds]
    ratio = estimates.ratio([(times[rank], other) for times, other in zip(rounds, others, strict=True)])
    if not ratio.is_clear or ratio.value <= UNEVEN:
        return None
    return Straggler(rank, row.result.parts.nodes[rank], median(others), ratio.value)


def parts_table(rows: Sequence[Row], *, main: Row | None = None) -> Table | None:
    """Return the parts of each row's step, with the range of their rounds where they do not add up to it."""
    measured = [row for row in rows if parts_of(row)]
    if not measured:
        return None
    cells = []
    for row in measured:
        values, known = {"step_ms": row.step_ms, **parts_of(row)}, row.result.parts.ranges
        shown = {}
        for key in ("step_ms", *PARTS):
            low, high = known.get(key, (None, None)) if not adds_up(row) else (None, None)
            shown[key] = Fact(key=key, value=values.get(key), low=low, high=high, unit="ms", trial=row.key)
        left = row.step_ms - sum(parts_of(row).values())
        rest: Fact | str = Fact(key="unaccounted_ms", value=left, unit="ms", trial=row.key) if adds_up(row) else "-"
        cells.append((row.label, *shown.values(), rest))
    notes = []
    if names := [row.name for row in measured if not adds_up(row)]:
        notes.append(texts.PARTS_DO_NOT_ADD_UP.format(names=join_names(names)))
    for row in rows:
        if found := find_straggler(row):
            ratio = format_fact(Fact(key="ratio", value=found.ratio, unit="x"))
            notes.append(texts.STRAGGLER.format(name=row.name, rank=found.rank, node=found.node, ratio=ratio))
    for row in rows:
        if (sync := row.result.communication) is not None and row.role == "main":
            exposed = row.result.parts.exposed_communication_ms
            shown_exposed = "an unknown part" if exposed is None else format_ms(exposed)
            notes.append(texts.SYNCHRONIZATION.format(ms=format_ms(sync.ms), exposed=shown_exposed))
    return Table(
        title="Step time, ms",
        header=("configuration", "total", *(_HEADS.get(key, name) for key, name in PARTS.items()), "unaccounted"),
        rows=tuple(cells),
        emphasis=next((index for index, row in enumerate(measured) if row is main), None),
        notes=tuple(notes),
        is_folded=len(rows) == 1,  # a note says it
    )

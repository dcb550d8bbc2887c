"""Statements on a speedup, in the words of `texts`: the answer, the answer in one line, and what makes it doubtful."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from pipeline.experiment.schema import Benchmark
from pipeline.protocol.estimates import LEAST_PAIRS, Estimate, pairs_to_resolve
from pipeline.results import texts
from pipeline.results.losses import FIRST_STEPS
from pipeline.results.record import FAR, Fact, format_fact
from pipeline.results.speedup import Row, is_unmeasurable, is_wide
from pipeline.wording import duration, figure

BUSY = 0.2  # Cores used by other processes from which they are mentioned
LONGEST_S = 600  # Seconds beyond which no longer measurement is suggested
_LEAST_S = 60  # Shortest measurement that is suggested; the default of benchmark.time_budget_s is 30 s
MOST_TIMES = 20  # Factor on the measuring time beyond which nothing longer is suggested


class Doubt(NamedTuple):
    """Why a speedup is inconclusive, and what would resolve it."""

    reason: str
    remedy: str = ""  # Action of the user; empty if there is none
    command: tuple[str, ...] = ()
    """Verb and settings that measure again, e.g. ("benchmark", "--repeats", "5"); empty if none does."""


def headline(row: Row, *, others: Sequence[Row] = ()) -> tuple[str, ...]:
    """Return the answer on a row's speedup in sentences, with its strategy if one of the others has the same name."""
    assert row.baseline is not None
    assert row.ratio is not None
    state = "invalid" if row.claim == "invalid" else _state(row.ratio)
    fields = _fields(row, row.baseline, row.ratio)
    if any(other is not row and other.short_name == row.short_name for other in others):
        fields["name"] = row.name
    return tuple(sentence.format(**fields).replace("; scaling efficiency -", "") for sentence in texts.HEADLINES[state])


def verdict(row: Row) -> str:
    """Return the answer on a row's speedup in one line; only for a row that has one."""
    assert row.baseline is not None
    assert row.ratio is not None
    state = "invalid" if row.claim == "invalid" else _state(row.ratio)
    return texts.VERDICTS[state].format(**_fields(row, row.baseline, row.ratio))


def compare(row: Row, other: Row) -> str:
    """Compare two rows, e.g. "2 workers are 1.07x as fast as 1 process on both cores (95% CI 1.01x to 1.15x)."."""
    ratio = row.compare(other)
    return texts.COMPARISONS[_state(ratio)].format(**_fields(row, other, ratio))


def explain_doubt(row: Row, *, main: Row) -> Doubt:
    """Return why the speedup of a row is inconclusive, and what would resolve it.

    ``main`` is the row that the result is about, whose intervals all others share.
    """
    ratio, result = row.ratio, main.result
    assert ratio is not None
    assert row.baseline is not None
    size, cores, slots_s = ratio.size, result.other_cores, result.slots_s
    is_busy, is_noisy = cores is not None and cores > BUSY, is_wide(ratio)
    fields = {"size": size, "cores": f"{cores or 0:.1f}", "took": duration(slots_s or 0)}

    def doubt(reason: str, remedy: str = "", *command: str, longer_s: float = 0.0) -> Doubt:
        named = texts.REMEDIES[remedy].format(longer=duration(longer_s)) if remedy else ""
        return Doubt(texts.REASONS[reason].format(**fields), named, command)

    if not size and row.role == "cell":
        return doubt("once", "several", "benchmark", "--repeats", "5")
    if not size:
        has_memory = row.baseline.result.micro_batches is None
        return doubt("apart", "rounds", "benchmark") if has_memory else doubt("no memory")
    pairs = pairs_to_resolve(ratio, confidence=row.confidence, at_most=MOST_TIMES * size)
    if slots_s is None:  # of a benchmark
        if pairs is None and not is_noisy:
            return doubt("close")
        return doubt("repeats", "more" if pairs else "repeat", "benchmark", "--repeats", str(pairs or 10))
    reason = "busy" if is_busy else "few rounds" if size < LEAST_PAIRS else "rounds"
    if reason == "rounds" and pairs is None and is_noisy:
        reason = "noise"
    stop = ", stop" if is_busy else ""
    if pairs is None or (longer_s := math.ceil(max(_LEAST_S, slots_s * pairs / size) / 10) * 10) > LONGEST_S:
        return doubt(reason, f"idle{stop}", "run") if is_busy or is_noisy else doubt("close")
    settings = (f"benchmark.rounds={max(pairs, Benchmark().rounds)}", f"benchmark.time_budget_s={longer_s}")
    return doubt(reason, f"longer{stop}", "run", *settings, longer_s=longer_s)


def _state(ratio: Estimate) -> str:
    """Return the state of a ratio, the key of its templates."""
    if not ratio.size:
        return "no interval"
    if is_unmeasurable(ratio):
        return "too noisy"
    name = ("faster" if ratio.value > 1 else "slower") if ratio.is_clear else "inconclusive"
    return f"{name}, wide" if is_wide(ratio) else name


def _fields(row: Row, other: Row, ratio: Estimate) -> dict[str, str]:
    """Return what fills the templates about two rows."""
    names = row.short_name, other.short_name  # the numbers of workers tell them apart, or else their strategies
    name, base = names if names[0] != names[1] else (row.name, other.name)
    is_plural = row.trial.workers > 1
    verbs = ("train", "are", "were", "do") if is_plural else ("trains", "is", "was", "does")
    efficiency, check = row.efficiency, row.loss_check
    shown = Fact(key="efficiency", value=None, unit="%")
    if efficiency is not None:
        shown = Fact(key="efficiency", value=efficiency.value, low=efficiency.low, high=efficiency.high, unit="%")
    first = ""
    if check:
        first = f"up to {figure(check.first, digits=2)}" if math.isfinite(check.first) else "a loss that is not finite"
    inverse = Estimate(1 / ratio.value, 1 / ratio.high, 1 / ratio.low if ratio.low > 0 else math.inf, ratio.size)
    return {
        "name": name,
        "base": base,
        "full": row.name,
        **dict(zip(("train", "are", "were", "do"), verbs, strict=True)),
        "level": f"{100 * row.confidence:g}%",
        "value": _format(ratio.value, ratio),
        "low": _format(ratio.low, ratio),
        "high": _format(ratio.high, ratio),
        "slower": _format(inverse.value, inverse),
        "slower_low": _format(inverse.low, inverse),
        "slower_high": _format(inverse.high, inverse),
        "efficiency": format_fact(shown, with_interval=shown.is_wide),
        "steps": str(FIRST_STEPS),
        "first": first,
        "tolerance": figure(check.tolerance) if check else "",
    }


def _format(value: float, ratio: Estimate) -> str:
    """Format a ratio's value or an end of its interval, with the decimals that show on which side of 1 it is."""
    if value >= FAR * max(1, ratio.value):
        return f"over {FAR:g}x"
    ends = {"low": ratio.low, "high": ratio.high} if ratio.size else {}
    return format_fact(Fact(key="ratio", value=value, unit="x", **ends), with_interval=False)

"""Claims about a row's speedup: none, not valid, inconclusive, or a factor by which it is faster or slower."""

import math
from typing import Literal, NamedTuple

from pipeline.protocol import estimates
from pipeline.protocol.estimates import Estimate
from pipeline.report.numbers.row import Row
from pipeline.report.text.loss_differences import explain_loss
from pipeline.report.text.ratios import ends_of, format_level, format_slower, invert, is_wide, value_of
from pipeline.report.text.row_names import are_several, count_workers, name_row
from pipeline.wording import duration

BUSY = 0.2
"""Cores used by other processes from which they are mentioned."""
LONGEST_S = 600
"""Seconds beyond which no longer measurement is suggested."""
_LEAST_S = 60
"""Shortest measurement that is suggested; the default of benchmark.time_budget_s is 30 s."""
MOST_TIMES = 20
"""Factor on the measuring time beyond which nothing longer is suggested."""

NOT_VALID = "speedup not valid"
"""Part of a result whose loss differs without a reason."""

Outcome = Literal["none", "invalid", "inconclusive", "faster", "slower"]


class Doubt(NamedTuple):
    """Why a speedup is inconclusive, and what would resolve it."""

    reason: str
    remedy: str = ""
    """Action of the user; empty if there is none."""
    command: str = ""
    """Words that measure again, with FILE, e.g. "benchmark FILE --repeats 5"; empty if there are none."""


def classify_speedup(row: Row, baseline: Row) -> Outcome:
    """Return what a row's speedup shows: "invalid" if its loss differs and nothing explains that."""
    if row.ratio is None:
        return "none"
    if row.same_training == "no" and not explain_loss(row, baseline):
        return "invalid"
    if not row.is_resolved:
        return "inconclusive"
    return "faster" if row.ratio.value > 1 else "slower"


def describe_speedup(row: Row, baseline: Row) -> str:
    """Return the speedup of a row in a sentence, with the row's name; only for a row that has one."""
    ratio, level = row.ratio, format_level(row.confidence)
    assert ratio is not None
    name, base = name_row(row), count_workers(baseline)
    match classify_speedup(row, baseline):
        case "invalid":
            return f"{name}: {NOT_VALID}, loss differs from the baseline"
        case "inconclusive" if not ratio.size:
            return f"{name}: inconclusive, {value_of(ratio)} measured without a confidence interval"
        case "inconclusive":
            return f"{name}: inconclusive, {ends_of(ratio)} ({level} CI)"
        case "slower":
            slower = _format_slower_range(ratio)
            value = "" if is_wide(ratio) else f"{format_slower(1 / ratio.value)} slower than {base} "
            return (
                f"{name}: {value}({level} CI {slower})"
                if value
                else f"{name}: {slower} slower than {base} ({level} CI)"
            )
        case _ if is_wide(ratio):
            return f"{name}: {ends_of(ratio)} as fast as {base} ({level} CI)"
    return f"{name}: {value_of(ratio)} as fast as {base} ({level} CI {ends_of(ratio)})"


def headline(row: Row, baseline: Row, *, efficiency: str) -> tuple[str, str]:
    """Return the result of a screen as a sentence, and what follows in brackets or in a second sentence."""
    ratio = row.ratio
    assert ratio is not None
    subject, base = _distinct_names(row, baseline)
    level = f"{format_level(row.confidence)} confidence interval"
    match classify_speedup(row, baseline):
        case "inconclusive":
            question = f"Inconclusive: can't tell whether {subject} {_verb(row, 'are', 'is')} faster than {base}"
            if not ratio.size:
                return question, f"Measured {value_of(ratio)} as fast, without a confidence interval"
            measured = "" if is_wide(ratio) else f"Measured {value_of(ratio)} as fast; "
            return question, f"{measured}{level} {ends_of(ratio)}, which includes 1.00x (equally fast)"
        case "slower":
            subject = f"{subject} {_verb(row, 'are', 'is')}"
            if is_wide(ratio):
                return f"{subject} {_format_slower_range(ratio)} SLOWER than {base}", f"({level})"
            slower = f"({level} {_format_slower_range(ratio)} slower)"
            return f"{subject} {format_slower(1 / ratio.value)} SLOWER than {base}", slower
        case _:
            value = ends_of(ratio) if is_wide(ratio) else value_of(ratio)
            ends = level if is_wide(ratio) else f"{level} {ends_of(ratio)}"
            more = f"; scaling efficiency {efficiency}" if efficiency != "-" else ""
            return f"{subject} {_verb(row, 'train', 'trains')} {value} as fast as {base}", f"({ends}{more})"


def compare_rows(row: Row, other: Row) -> str:
    """Compare two rows that were measured alternately, e.g. "2 workers are 1.07x as fast as 1 worker (95% CI ...)"."""
    ratio, level = row.throughput_over(other), format_level(row.confidence)
    subject, base = _distinct_names(row, other)
    if not ratio.size:
        measured = f"{subject} {_verb(row, 'were', 'was')} measured {value_of(ratio)} as fast as {base}"
        return f"{measured}, without a confidence interval."
    if not ratio.is_clear and is_wide(ratio):
        verb = _verb(other, "are", "is")
        return f"Too noisy to tell whether {subject} or {base} {verb} faster ({level} CI {ends_of(ratio)})."
    if not ratio.is_clear:
        return f"{subject} and {base} are equally fast within the noise ({level} CI {ends_of(ratio)})."
    is_slower, subject = ratio.value < 1, f"{subject} {_verb(row, 'are', 'is')}"
    ends = _format_slower_range(ratio) if is_slower else ends_of(ratio)
    value = format_slower(1 / ratio.value) if is_slower else value_of(ratio)
    than = f"slower than {base}" if is_slower else f"as fast as {base}"
    return (
        f"{subject} {ends} {than} ({level} CI)." if is_wide(ratio) else f"{subject} {value} {than} ({level} CI {ends})."
    )


def explain_doubt(row: Row, *, main: Row, baseline: Row) -> Doubt:
    """Return why the speedup of a row is inconclusive, and what would resolve it.

    Args:
        row: the row.
        main: row that the result is about, whose intervals all others share.
        baseline: row that the speedup is relative to.
    """
    assert row.ratio is not None
    if row.ratio.size == 0:
        return _explain_missing_interval(row, baseline)
    size = row.ratio.size
    pairs = estimates.pairs_to_resolve(row.ratio, confidence=row.confidence, at_most=MOST_TIMES * size)
    is_busy = main.other_cores is not None and main.other_cores > BUSY
    if main.slots_s is None:  # of a comparison
        return _explain_repeats(row, pairs=pairs)
    reason = f"{size} rounds are too few for a speedup this close to 1x"
    if is_busy:
        reason = f"Other processes used {main.other_cores:.1f} CPU cores during the measurement"
    elif size < estimates.LEAST_PAIRS:
        reason = f"Only {size} rounds fit into benchmark.time_budget_s (they took {duration(main.slots_s)})"
    elif pairs is None and is_wide(row.ratio):
        reason = "The machine was too busy with other work"
    again = "Stop them, train again" if is_busy else "Train again"
    if pairs is None or (longer_s := math.ceil(max(_LEAST_S, main.slots_s * pairs / size) / 10) * 10) > LONGEST_S:
        if is_busy or is_wide(row.ratio):
            return Doubt(reason, f"{again} on an idle machine:", "run FILE")
        return Doubt("The speedup is too close to 1x to measure on this machine")
    command = f"run FILE benchmark.rounds={max(pairs, estimates.LEAST_PAIRS)} benchmark.time_budget_s={longer_s}"
    return Doubt(reason, f"{again} and measure longer (about {duration(longer_s)}):", command)


def _explain_missing_interval(row: Row, baseline: Row) -> Doubt:
    if row.role == "cell":
        return Doubt(
            "It was measured once, so the noise is unknown", "Measure several times:", "benchmark FILE --repeats 5"
        )
    if baseline.micro_batches is not None:  # which pipeline benchmark has no memory for
        return Doubt("The baseline did not fit into memory next to the training, so they were not measured alternately")
    return Doubt(
        "The baseline was not measured alternately with the training", "Measure both in rounds:", "benchmark FILE"
    )


def _explain_repeats(row: Row, *, pairs: int | None) -> Doubt:
    assert row.ratio is not None
    if pairs is None and not is_wide(row.ratio):
        return Doubt("The speedup is too close to 1x to measure on this machine")
    reason = f"{row.ratio.size} repeats are too few for this much noise"
    again = "Measure again on an idle machine" if pairs is None else "Measure more often"
    return Doubt(reason, f"{again}:", f"benchmark FILE --repeats {pairs or 10}")


def _format_slower_range(ratio: Estimate) -> str:
    """Format the interval of a slowdown, e.g. "3.0x to 5.3x"."""
    slower = invert(ratio)
    return f"{format_slower(slower.low)} to {format_slower(slower.high)}"


def _distinct_names(row: Row, other: Row) -> tuple[str, str]:
    """Return the names of two rows, without strategies if the numbers of workers tell them apart."""
    names = count_workers(row), count_workers(other)
    return names if names[0] != names[1] else (name_row(row), name_row(other))


def _verb(row: Row, plural: str, singular: str) -> str:
    return plural if are_several(row) else singular

"""The sentences of a report on losses that differ from the baseline's."""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

from pipeline.protocol.trial_result import BATCH_TRANSFORM, RANDOM_NUMBERS
from pipeline.report.numbers.row import FIRST_STEPS, Row
from pipeline.report.text.row_names import name_row
from pipeline.wording import figure


def describe_losses(rows: Sequence[Row], *, main: Row) -> Iterator[str]:
    """Yield a sentence for all rows whose loss differs for the same reason; the main row's reason is first."""
    baseline = rows[0]
    told = [(describe_loss(row, baseline), row) for row in rows]
    differing = sorted(
        ((text, row) for text, row in told if text), key=lambda pair: (_order(pair[1], main=main), pair[0])
    )
    for text, group in groupby(differing, key=lambda pair: pair[0]):
        yield f"{' and '.join(name_row(row) for _, row in group)}: {text}"


def describe_loss(row: Row, baseline: Row) -> str:
    """Return how a row's loss differs from the baseline's, and why; empty if it does not."""
    if row.same_training == "at first":
        drifts = f"Loss equals the baseline's for {FIRST_STEPS} steps, then"
        if math.isinf(row.largest_loss_difference or 0.0):
            return f"{drifts} one of the two is not a finite number."
        return f"{drifts} drifts by {format_most(row.largest_loss_difference)} (floating-point rounding)."
    if row.same_training != "no":
        return ""
    differs = f"Loss differs from the baseline's by {format_most(row.first_loss_difference)}"
    if reasons := explain_loss(row, baseline):
        return f"{differs} in the first {FIRST_STEPS} steps: {reasons}."
    return (
        f"{differs} within the first {FIRST_STEPS} steps. Rounding explains at most {figure(row.loss_tolerance)}. The "
        "two do not train the same model, so ignore the speedup."
    )


def format_most(difference: float | None) -> str:
    """Format the largest difference of two series of losses, e.g. "up to 0.027"."""
    if difference is not None and math.isinf(difference):
        return "an amount that is not finite (a loss is NaN or infinite)"
    return f"up to {figure(difference or 0.0, digits=2)}"


def explain_loss(row: Row, baseline: Row) -> str:
    """Return the layers and options that explain different losses on the same batches; empty if none does."""
    if max(row.replicas, baseline.replicas) < 2:
        return ""
    masks = [kind for kind in row.coupling if "Dropout" in kind]
    has_random_numbers = RANDOM_NUMBERS in row.coupling and not masks
    statistics = find_statistics(row)
    reasons = [describe_share(kind) for kind in statistics]
    if statistics and (parts := baseline.micro_batches) is not None:
        shared = [describe_share(kind) for kind in statistics if kind != "SyncBatchNorm"]
        reasons = [*shared, f"the baseline computes the statistics of each of its {parts} micro-batches"]
    hook = row.options.get("communication_hook", "none")
    mixed = [f"{kind} mixes the samples of each worker separately" for kind in row.coupling if kind == BATCH_TRANSFORM]
    return ", ".join(
        [
            *reasons,
            *(f"{kind} draws a different mask on each worker" for kind in masks),
            *([f"each worker draws different {RANDOM_NUMBERS}"] if has_random_numbers else []),
            *mixed,
            *([] if hook == "none" else [f"communication_hook: {hook} rounds the gradients"]),
        ]
    )


def describe_share(kind: str) -> str:
    """Say of batch statistics, or of buffers by name, that each worker computes them from its part of the batch."""
    if kind.startswith("buffer"):
        verb = "are" if kind.startswith("buffers") else "is"
        return f"the {kind} {verb} computed separately on each worker"
    return f"{kind} computes its statistics separately on each worker"


def find_statistics(row: Row) -> list[str]:
    """Return the layers of a row's model that compute with statistics of their batch."""
    others = (RANDOM_NUMBERS, BATCH_TRANSFORM)
    return [kind for kind in row.coupling if kind not in others and "Dropout" not in kind]


def _order(row: Row, *, main: Row) -> tuple[bool, bool]:
    """Sort rows that differ from the start before those that drift, the main row first."""
    return row.same_training == "at first", row != main

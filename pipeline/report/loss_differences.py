"""The sentences of a report on losses that differ from the baseline's."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from pipeline.protocol.trial_result import RANDOM_NUMBERS
from pipeline.report import FIRST_STEPS, Row
from pipeline.report.tables import amount


def describe_losses(rows: Sequence[Row], *, main: Row) -> Iterator[str]:
    """Yield remarks on trainings whose losses differ from the baseline's, in the first steps or later."""
    baseline = rows[0]
    first = _reasons(main, baseline)
    by_reasons = sorted(
        ((_reasons(row, baseline), row) for row in rows if row.same_training == "no"),
        key=lambda pair: (pair[0] != first, pair[0]),
    )
    for reasons, group in groupby(by_reasons, key=lambda pair: pair[0]):
        different = [row for _, row in group]
        difference = amount(max(row.first_loss_difference or 0.0 for row in different))
        losses = (
            f"{_loss_of(different)} from that of {baseline.title} by up to {difference} in the first {FIRST_STEPS} "
            "steps"
        )
        tolerance = amount(different[0].loss_tolerance)
        yield (
            f"{losses}: {reasons}."
            if reasons
            else (
                f"Warning: {losses}, rounding explains {tolerance}, and no layer of the model explains the rest: "
                "this is a different training, so its speedup is meaningless."
            )
        )
    if drifted := [row for row in rows if row.same_training == "at first"]:
        difference = amount(max(row.largest_loss_difference or 0.0 for row in drifted))
        yield (
            f"{_loss_of(drifted)} from that of {baseline.title} by up to {difference}, but not in the first "
            f"{FIRST_STEPS} steps: training amplifies the rounding of sums in another order."
        )


def _loss_of(rows: Sequence[Row]) -> str:
    names = [row.title for row in rows]
    return f"The loss of {' and of '.join(names)} differs"


def _reasons(row: Row, baseline: Row) -> str:
    """Explain different losses on the same batches by layers and options; empty if they don't explain them."""
    if max(row.replicas, baseline.replicas) < 2:
        return ""
    masks = [kind for kind in row.coupling if "Dropout" in kind]
    own = [kind for kind in row.coupling if kind == RANDOM_NUMBERS and not masks]
    statistics = find_statistics(row)
    reasons = [describe_share(kind) for kind in statistics]
    if statistics and (parts := baseline.micro_batches) is not None:
        shared = [describe_share(kind) for kind in statistics if kind != "SyncBatchNorm"]
        reasons = [*shared, f"the baseline takes the statistics of each of its {parts} micro-batches"]
    hook = row.options.get("communication_hook", "none")
    local = row.options.get("local_sgd_period")
    apart = [f"with local_sgd_period: {local} workers train independently between averages"] if local else []
    rounding = [] if hook == "none" else [f"communication_hook: {hook} rounds the gradients"]
    return ", ".join(
        [
            *reasons,
            *(f"{kind} draws a mask of its own in each worker" for kind in masks),
            *(f"a step draws other {kind} in each worker" for kind in own),
            *rounding,
            *apart,
        ]
    )


def describe_share(kind: str) -> str:
    """Say of batch statistics, or of buffers by name, that they are those of a worker's share."""
    the, use = ("the ", "use" if kind.startswith("buffers") else "uses") if kind.startswith("buffer") else ("", "uses")
    return f"{the}{kind} {use} each worker's share of the batch"


def find_statistics(row: Row) -> list[str]:
    """Return the layers of a row's model that compute with statistics of their batch."""
    return [kind for kind in row.coupling if kind != RANDOM_NUMBERS and "Dropout" not in kind]

"""Advice on the batch size of a device, from measurements with several: ``pipeline benchmark --batch-sizes``.

The global batch decides what is trained. It is kept if gradient accumulation alone leads to the recommended size.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.config.schema import Experiment
from pipeline.report import Row, is_clear
from pipeline.report.row_names import name_row
from pipeline.report.rule import Case, Finding, scaled_rate
from pipeline.report.tables import rate

CLOSE = 0.95
"""Fraction of the best throughput from which a throughput counts as close to it."""


def recommend_batch(case: Case, rows: Sequence[Row]) -> Finding | None:
    """Recommend the smallest batch per device whose throughput is close to the best; None if the file has it."""
    measured = _find_sizes(case.experiment, rows)
    train = case.experiment.train
    declared = next((_size_of(train.global_batch_size, case.experiment, row) for row in measured.values()), 0)
    if not measured.keys() - {declared}:
        return None
    most = max(row.samples_per_second.median for row in measured.values())
    size = min(size for size, row in measured.items() if row.samples_per_second.median >= CLOSE * most)
    row, own = measured[size], measured.get(declared)
    if size == declared or (size > declared and own is not None and not _is_faster(row, own)):
        return None
    if not (values := _change(case.experiment, row, size=size)):
        return None
    batch = size * row.replicas * values.get("train.gradient_accumulation", train.gradient_accumulation)
    keeps = not any("batch" in key for key in values)
    kept = "gradient accumulation keeps the global batch size, and so the training"
    other = f"a global batch size of {batch} makes fewer optimizer steps; check that the model trains as well"
    return Finding(
        reason=_reason(row, own, declared=declared, size=size),
        values=values,
        change=kept if keeps else other,
        is_measured=True,
        use=name_row(row),
        gain=1 - own.samples_per_second.median / row.samples_per_second.median if own and size > declared else 0.0,
    )


def _find_sizes(experiment: Experiment, rows: Sequence[Row]) -> dict[int, Row]:
    """Return the rows of the declared configuration by the batch size of a device."""
    parallel = experiment.parallel
    wanted = (parallel.strategy, parallel.workers, dict(parallel.options))
    own = (row for row in rows if row.role in ("baseline", "cell") and row.scaling == "strong")
    same = (row for row in own if (row.strategy, row.workers, dict(row.options)) == wanted)
    return {_size_of(row.global_batch_size, experiment, row): row for row in same}


def _size_of(batch: int, experiment: Experiment, row: Row) -> int:
    """Return the samples in the largest micro-batch of a device."""
    return -(-batch // (row.replicas * experiment.train.gradient_accumulation))


def _change(experiment: Experiment, row: Row, *, size: int) -> Mapping[str, Any]:
    """Return the keys that make a device's batch the recommended one, with the same global batch if possible."""
    train = experiment.train
    wanted = -(-train.global_batch_size // (size * row.replicas))
    accumulation = min(wanted, max(1, train.global_batch_size // row.workers))
    values: dict[str, Any] = {}
    if accumulation != train.gradient_accumulation:
        values["train.gradient_accumulation"] = accumulation
    after = -(-train.global_batch_size // (row.replicas * accumulation))
    if after < size and (not values or accumulation == 1):
        values |= experiment.batch_keys(size * row.replicas * accumulation)
        values |= scaled_rate(experiment, base=train.global_batch_size)
    return values


def _is_faster(row: Row, other: Row) -> bool:
    return is_clear(ratio := row.throughput_over(other)) and ratio.value > 1


def _reason(row: Row, own: Row | None, *, declared: int, size: int) -> str:
    best = f"{name_row(row)}: {rate(row.samples_per_second)} samples/s"
    if own is None:
        return f"{best}; the file's batch size per device, {declared}, could not be measured"
    compared = "is the smallest within 5% of the best throughput" if size < declared else "is faster"
    return f"{best} {compared}; the file's {declared} has {rate(own.samples_per_second)}"

"""Advice on strategy and number of workers: go where another measurement was faster, or as fast with less."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from pipeline.speedup import Row
from pipeline.speedup.finding import Case, Finding
from pipeline.speedup.tables import amount

WORTH = 1.05
"""Faster by less than 5% isn't worth a change, even where it is no noise."""
_TINY_MS = 10.0
"""Computing less than this for a step is little against what any exchange costs: a tiny model."""


class Better(NamedTuple):
    """A row that is better than the one declared."""

    row: Row
    row_time: float
    """Its time for a sample, as a fraction of that of the row declared."""
    finding: Finding


def better(rows: Sequence[Row], case: Case) -> Better | None:
    """The fastest row that is faster beyond noise, or else the smallest that is no slower; None if there is none."""
    others = [row for row in rows if _is_alternative(row, case.row)]
    faster = [row for row in others if _is_faster(row, case.row)]
    if faster:
        return _better(max(faster, key=lambda row: row.samples_per_second.median), case)
    smaller = [row for row in others if _size(row) < _size(case.row) and not _is_faster(case.row, row)]
    smaller = [row for row in smaller if _ratio(case.row, row)[1] < WORTH]
    return _better(min(smaller, key=_size), case) if smaller else None


def _is_alternative(row: Row, own: Row) -> bool:
    """Whether the row trains the same in another way; one of weak scaling trains something else."""
    trains_the_same = row.global_batch_size == own.global_batch_size and (row.same_training != "no" or row.coupling)
    is_another = (row.strategy, row.workers, row.cpus, row.options) != (
        own.strategy, own.workers, own.cpus, own.options
    )  # fmt: skip
    return bool(trains_the_same) and is_another and not row.is_one_replica_dp


def _size(row: Row) -> int:
    return row.cpus if row.device == "cpu" else row.replicas


def _ratio(row: Row, other: Row) -> tuple[float, float]:
    """The lowest and the median ratio of throughputs."""
    against = row.against(other)
    if against.speedup is None or against.speedup_low is None:  # what it is called forbids the claim, not the figures
        ratio = row.samples_per_second.median / other.samples_per_second.median
        return row.samples_per_second.low / other.samples_per_second.high, ratio
    return against.speedup_low, against.speedup


def _is_faster(row: Row, other: Row) -> bool:
    low, ratio = _ratio(row, other)
    return low > 1 and ratio > WORTH


def _better(row: Row, case: Case) -> Better:
    own = case.row
    _, ratio = _ratio(row, own)
    finding = Finding(reason=_reason(row, own), values=_values(row, case), gain=max(0.0, 1 - 1 / ratio))
    return Better(row, 1 / ratio, finding)


def _reason(row: Row, own: Row) -> str:
    _, ratio = _ratio(row, own)
    rates = f"{amount(row.samples_per_second.median)} and {amount(own.samples_per_second.median)} samples/s"
    sentence = f"{row.title} is {ratio:.2f}x as fast as {own.title} ({rates})"
    if _size(row) < _size(own):
        sentence += f", with {row.devices} instead of {own.devices}"
    if (exposed := own.parts.exposed_communication_ms) and row.workers < own.workers:
        step = own.parts.step_ms.median
        sentence += f"; of its steps of {amount(step)} ms, {amount(exposed)} ms are exchange of gradients"
        if own.parts.compute_ms < _TINY_MS:
            sentence += ", too much for a model this small"
    return sentence


def _values(row: Row, case: Case) -> dict[str, Any]:
    """The row as keys of ``parallel``, as far as it differs from the file."""
    parallel = case.experiment.parallel
    values: dict[str, Any] = {"parallel.strategy": row.strategy, "parallel.workers": row.workers}
    if dict(row.options) != dict(parallel.options):
        values["parallel.options"] = dict(row.options)
    cores = row.cpus // row.workers
    if row.device == "cpu" and (row.role == "reference" or parallel.cpus_per_worker not in (None, cores)):
        values["parallel.cpus_per_worker"] = cores
    return values

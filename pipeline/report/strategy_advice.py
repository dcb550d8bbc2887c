"""Advice on strategy and workers: go where another measurement was faster; ask where it was as fast with less."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from pipeline.report import Row
from pipeline.report.rule import Case, Finding
from pipeline.report.tables import amount, rate, times

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
    """The fastest row that is faster beyond noise, or else the smallest that is hardly slower; None: there is none."""
    others = [row for row in rows if _is_alternative(row, case.row)]
    faster = [row for row in others if _is_faster(row, case.row)]
    if faster:
        return _better(max(faster, key=lambda row: row.samples_per_second.median), case, is_faster=True)
    smaller = [row for row in others if _size(row) < _size(case.row) and not _is_faster(case.row, row)]
    smaller = [row for row in smaller if case.row.throughput_over(row).median < WORTH]
    return _better(min(smaller, key=_size), case, is_faster=False) if smaller else None


def _is_alternative(row: Row, own: Row) -> bool:
    """Whether the row trains the same in another way; one of weak scaling trains something else."""
    trains_the_same = row.global_batch_size == own.global_batch_size and (row.same_training != "no" or row.coupling)
    is_another = (row.strategy, row.workers, row.cpus, row.options) != (
        own.strategy, own.workers, own.cpus, own.options
    )  # fmt: skip
    return bool(trains_the_same) and is_another and not row.is_one_replica_dp


def _size(row: Row) -> int:
    return row.cpus if row.device == "cpu" else row.replicas


def _is_faster(row: Row, other: Row) -> bool:
    """Beyond the noise, which a single window doesn't show."""
    ratio = row.throughput_over(other)
    return min(row.samples_per_second.windows, other.samples_per_second.windows) > 1 and (
        ratio.low > 1 and ratio.median > WORTH
    )


def _better(row: Row, case: Case, *, is_faster: bool) -> Better:
    own = case.row
    ratio = row.throughput_over(own).median
    reason = _reason(row, own, is_faster=is_faster)
    finding = Finding(reason=reason, values=_values(row, case), gain=max(0.0, 1 - 1 / ratio), is_measured=is_faster)
    return Better(row, 1 / ratio, finding)


def _reason(row: Row, own: Row, *, is_faster: bool) -> str:
    rates = f"{rate(row.samples_per_second)} and {rate(own.samples_per_second)} samples/s"
    sentence = f"{own.title} is not faster than {row.title} beyond the noise ({rates})"
    if is_faster:
        sentence = (
            f"{row.title} is {times(row.throughput_over(own), has_interval=False)} as fast as {own.title} ({rates})"
        )
    if _size(row) < _size(own):
        sentence += f", with {row.devices} instead of {own.devices}"
    if (exposed := own.parts.exposed_communication_ms) and row.workers < own.workers:
        step = own.step_ms.median
        sentence += f"; of its steps of {amount(step)} ms, {amount(exposed)} ms are exchange of gradients"
        if (compute := own.parts.compute_ms) is not None and compute < _TINY_MS:
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

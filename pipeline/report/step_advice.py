"""Advice on stragglers, data loading, cores and the learning rate."""

import math
from collections.abc import Sequence

from pipeline.report import Row, is_clear
from pipeline.report.row_names import name_row
from pipeline.report.rule import Case, Finding, pasted, scaled_rate
from pipeline.report.tables import Straggler, amount, rate
from pipeline.wording import counted

DATA_WAIT = 0.1
"""Fraction of a step in data loading below which there is no advice: the order of loading and computing explains it."""
STRAGGLES = 1.25
"""Ratio to the other ranks' time from which a rank is a straggler; equal machines differ by a few percent."""


def straggler(case: Case) -> Finding | None:
    """Name a rank that takes clearly longer for its own work than the ranks that wait for it."""
    slowest = Straggler.of(case.row)
    if slowest is None or slowest.ratio < STRAGGLES * _uneven(case.row):
        return None
    lost = (slowest.ratio - 1) * slowest.others_ms
    if not case.is_clear(lost):
        return None
    own, rest = amount(slowest.ratio * slowest.others_ms), amount(slowest.others_ms)
    who = f"rank {slowest.rank} on {slowest.node}"
    return Finding(
        reason=f"{who} takes {own} ms per step without waiting for other ranks, the other ranks {rest} ms",
        change=f"find out what slows it down on {slowest.node}; all ranks wait for the slowest rank",
        gain=lost / case.row.step_ms.median,
        is_measured=True,
    )


def data_wait(case: Case) -> Finding | None:
    """Suggest more DataLoader workers if steps wait for data."""
    wait, step = case.row.parts.data_wait_ms, case.row.step_ms.median
    if case.row.share_of_data_wait < DATA_WAIT or not case.is_clear(wait) or wait > step:
        return None
    now = case.experiment.loader.num_workers
    # Reading a batch takes `wait` on top in the training process, or keeps each of `now` processes busy for a step.
    needed = math.ceil((now * step or wait) / max(step - wait, step / 8))
    most = max(2, (case.cores or 2) // case.workers_per_node)
    if (loaders := min(max(needed, now + 1), most)) <= now:
        values, change = (
            {},
            f"{counted(now, 'DataLoader worker')} for {counted(most, 'core')} are too slow; speed up __getitem__",
        )
    else:
        values, change = {"loader.num_workers": loaders}, _where_loaders_run(case, loaders)
    return Finding(
        reason=f"{name_row(case.row)}: {amount(wait)} ms of each {amount(step)} ms step are data loading",
        values=values,
        change=change,
        gain=case.row.share_of_data_wait,
    )


def _where_loaders_run(case: Case, loaders: int) -> str:
    """Return a warning if there are no idle cores for DataLoader workers."""
    if case.row.device != "cpu" or case.cores is None:
        return ""
    computing = case.workers_per_node * case.cores_per_worker
    if computing + case.workers_per_node * loaders <= case.cores:
        return ""
    return "no core is idle, so DataLoader workers help only if loading waits for storage"


def idle_cores(case: Case, rows: Sequence[Row]) -> Finding | None:
    """Suggest more cores per worker if the file leaves cores idle and no row shows the effect of more cores."""
    row, wanted = case.row, case.experiment.parallel.cpus_per_worker
    if row.device != "cpu" or wanted is None or case.cores is None:
        return None
    per_worker = case.cores // case.workers_per_node - case.experiment.loader.num_workers
    if per_worker <= case.cores_per_worker or any(_has_more_cores(other, row) for other in rows):
        return None
    used = case.workers_per_node * case.cores_per_worker
    return Finding(
        reason=f"{name_row(row)}: {used} of {case.cores} cores are used",
        values={"parallel.cpus_per_worker": per_worker},
        gain=(1 - used / case.cores) * (1 - row.share_of_communication) / 2,  # threads rarely pay in full
    )


def _has_more_cores(row: Row, other: Row) -> bool:
    return row.workers == other.workers and row.cpus > other.cpus


def matmul_precision(case: Case) -> Finding | None:
    """Suggest TF32 if matrix products of fp32 leave faster tensor cores idle."""
    row = case.row
    if case.experiment.train.precision != "fp32" or row.matmul_precision != "highest" or not row.has_tf32:
        return None
    return Finding(
        reason=f"{row.gpus[0]} has tensor cores for TF32, but computes matrix products in fp32",
        values={"train.matmul_precision": "high"},
        change="TF32 keeps 10 bits of the mantissa, so check that the model still trains as well",
    )


def learning_rate(case: Case, rows: Sequence[Row]) -> Finding | None:
    """Suggest scaling the learning rate if it was chosen for another global batch size."""
    train = case.experiment.train
    scaling = train.lr_scaling
    if "base_batch_size" in scaling.model_fields_set and train.global_batch_size > scaling.base_batch_size:
        reason = f"The global batch size is {train.global_batch_size}, but the learning rate was chosen for"
        values = scaled_rate(case.experiment, base=scaling.base_batch_size)
        return Finding(reason=f"{reason} {scaling.base_batch_size}", values=values) if values else None
    weak = [row for row in rows if row.scaling == "weak" and row.global_batch_size > train.global_batch_size]
    fastest = max(weak, key=lambda row: row.samples_per_second.median, default=None)
    if fastest is None or not is_clear(ratio := fastest.throughput_over(case.row)) or ratio.value < 1:
        return None
    values = scaled_rate(case.experiment, base=train.global_batch_size)
    reason = (
        f"{name_row(fastest)}: {rate(fastest.samples_per_second)} samples/s with a global batch size of "
        f"{fastest.global_batch_size}, for which the learning rate was not chosen"
    )
    change = f"if you train with {pasted(case.experiment.batch_keys(fastest.global_batch_size))}"
    return Finding(reason=reason, values=values, change=change) if values else None


def _uneven(row: Row) -> float:
    """Return the largest ratio of samples between two ranks."""
    fewest = max(1, row.global_batch_size // row.workers)
    return -(-row.global_batch_size // row.workers) / fewest

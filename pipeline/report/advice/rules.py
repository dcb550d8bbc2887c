"""Rules that give advice on one row: a `Case` leads to a `Finding` or to None.

They are on gradient synchronization, stragglers, data loading, cores and the precision of matrix products.
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.experiment.load import override
from pipeline.experiment.schema import Experiment
from pipeline.experiment.values import Frozen
from pipeline.report.numbers.old_breakdown import has_consistent_parts
from pipeline.report.numbers.row import Advice, Row
from pipeline.report.text.row_names import name_row
from pipeline.report.text.tables import Straggler, amount
from pipeline.wording import counted

EXPOSED = 0.2
"""Fraction of a step in exposed communication that is worth a change; tutorials call an efficiency of 80% good."""
SLOW_EXPOSED = 0.25
"""Fraction of a step in exposed communication that is worth sending fewer bits, which loses accuracy."""
SLOW_GBIT = 10.0
"""Gbit/s below which a link is slow, e.g. Ethernet."""
FEWEST_MB = 1.0
"""Size of gradients below which latency dominates, which sending fewer bits doesn't reduce."""
_KEPT = 0.5
"""Approximate fraction of the exposed communication that remains with a hook, the hook's own work included.

Measured with 4 MB of gradients on a link of 200 Mbit/s between two CPU workers: 0.5 to 0.7.
"""
_SEARCH = 0.02
"""Assumed cost of the search for unused parameters, not measured; small, so that this advice comes late."""
DATA_WAIT = 0.1
"""Fraction of a step in data loading below which there is no advice: the order of loading and computing explains it."""
STRAGGLES = 1.25
"""Ratio to the other ranks' time from which a rank is a straggler; equal machines differ by a few percent."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row to give advice on."""

    row: Row
    experiment: Experiment
    cores: int | None
    """Cores of each node; None if unknown."""

    @property
    def workers_per_node(self) -> int:
        """Workers on the node with most workers."""
        nodes = self.row.parts.nodes
        return max(nodes.count(node) for node in nodes)

    @property
    def cores_per_worker(self) -> int:
        """Cores that each worker has."""
        return self.row.cpus // self.row.workers

    def is_clear(self, ms: float) -> bool:
        """Return True if a part of a step, a median of several rounds, is longer than the noise of the step.

        The noise counts up to half the step: one disturbed round is no reason to doubt a part that dominates the step.
        """
        return ms > min(self.row.noise_ms, self.row.step_ms.median / 2)


class Finding(Frozen):
    """Something that costs time, with a change that saves it."""

    reason: str
    """Sentence about the measurement behind the finding."""
    values: Mapping[str, Any] = {}
    """New values in the experiment file, by dotted key."""
    change: str = ""
    """Action to take in addition to ``values`` or instead, in words."""
    is_measured: bool = False
    """True if this run measured ``values``.

    Otherwise they are a suggestion to try: shared cores, caches and links may defeat any formula.
    """
    use: str = ""
    """See `Advice`, also for the next field."""
    why: str = ""
    gain: float = 0.0
    """Estimated fraction of a step that the change saves; findings are ordered by it."""

    @property
    def advice(self) -> Advice:
        """Finding in words."""
        overrides = format_overrides(self.values)
        change = f"{'set' if self.is_measured else 'try'} {overrides}" if overrides else ""
        return Advice(
            reason=self.reason,
            change="; ".join(filter(None, [self.change, change])),
            key=next(iter(self.values), ""),
            overrides=overrides,
            measured=self.is_measured,
            use=self.use,
            why=self.why,
        )


def format_overrides(values: Mapping[str, Any]) -> str:
    """Format keys and values for a shell, e.g. "train.global_batch_size=128 loader.num_workers=2"."""
    return shlex.join(override(key, value) for key, value in values.items())


def scale_rate(experiment: Experiment, *, base: int) -> dict[str, Any]:
    """Return the keys that scale a learning rate chosen for global batches of ``base``; empty if the file scales it.

    The rule is linear for SGD (Goyal et al. 2017, arXiv 1706.02677) and the square root for Adam and its kin (Malladi
    et al. 2022, arXiv 2205.10287).
    """
    optimizer = experiment.optimizer
    if experiment.train.lr_scaling.rule != "none" or optimizer is None:  # of several, each may follow another rule
        return {}
    rule = "sqrt" if "adam" in optimizer.target.lower() else "linear"
    return {"train.lr_scaling.rule": rule, "train.lr_scaling.base_batch_size": base}


def larger_batch(case: Case) -> Finding | None:
    """Suggest a larger global batch if gradient synchronization takes much of a step."""
    row, train = case.row, case.experiment.train
    ends_early = row.role == "main" and row.steps < 2 * (train.epochs or 1)  # too few samples for larger batches
    if not _exchange_is_long(case, share=EXPOSED) or ends_early:
        return None
    batch = 2 * train.global_batch_size
    values: dict[str, Any] = {**case.experiment.batch_keys(batch)}
    # Keep the size of micro-batches, since memory may not hold larger ones; splitting a whole batch only slows kernels.
    if train.gradient_accumulation > 1:
        values["train.gradient_accumulation"] = 2 * train.gradient_accumulation
    return Finding(
        reason=_exchange(row),
        values=values | scale_rate(case.experiment, base=train.global_batch_size),
        change="a batch twice as large needs half as many synchronizations; check that the model trains as well",
        gain=row.share_of_communication / 2,
    )


def communication_hook(case: Case) -> Finding | None:
    """Suggest a communication hook, which sends fewer bits, if the link is slow."""
    row = case.row
    if row.strategy != "ddp" or row.options.get("communication_hook", "none") != "none":
        return None
    if case.experiment.train.precision == "fp64":
        return None
    if case.experiment.optimizers:  # which use no hook of DDP
        return None
    # CPU processes on one machine exchange through memory, which fewer bits don't speed up.
    is_local = row.device == "cpu" and len(set(row.parts.nodes)) == 1
    if is_local or row.gradient_mb < FEWEST_MB or not _exchange_is_long(case, share=SLOW_EXPOSED):
        return None
    if (gbit := exchange_gbit(row)) >= SLOW_GBIT:
        return None
    hook = "bf16" if row.device == "cuda" else "fp16"
    return Finding(
        reason=f"{_exchange(row)}, for {amount(row.gradient_mb)} MiB at about {amount(gbit)} Gbit/s",
        values={"parallel.options.communication_hook": hook},
        change="gradients lose precision, so check that the model still trains as well",
        gain=row.share_of_communication * (1 - _KEPT),
    )


def find_unused_search(case: Case) -> Finding | None:
    """Suggest ending ddp's search for unused parameters if all parameters are used, or the unused ones don't change."""
    row = case.row
    if row.strategy != "ddp" or not row.options.get("find_unused_parameters"):
        return None
    values: dict[str, Any] = {"parallel.options.find_unused_parameters": False}
    found, change = "all parameters got a gradient", "unless other steps skip some"
    if row.unused_parameters:
        values["parallel.options.static_graph"] = True
        found, change = f"{row.unused_parameters} got no gradient", "if they are the same in every step"
    return Finding(
        reason=f"{name_row(row)}: DDP searches for unused parameters in each step; {found}",
        values=values,
        change=change,
        gain=_SEARCH,
    )


def exchange_gbit(row: Row) -> float:
    """Return Gbit/s sent by each worker if all of a ring all-reduce was exposed; an upper bound of the link's speed."""
    sent = 2 * (row.workers - 1) / row.workers * row.gradient_mb * 2**20 * 8
    return sent / (row.parts.exposed_communication_ms or math.inf) / 1e6


def _exchange_is_long(case: Case, *, share: float) -> bool:
    exposed = case.row.parts.exposed_communication_ms
    is_long = exposed is not None and case.row.share_of_communication > share and case.is_clear(exposed)
    return is_long and has_consistent_parts(case.row)


def _exchange(row: Row) -> str:
    exposed = row.parts.exposed_communication_ms or 0.0
    return f"{name_row(row)}: {describe_part(row, exposed)} exposed communication"


def describe_part(row: Row, ms: float) -> str:
    """Start a sentence on a part of a row's step, e.g. "14 ms of each 60 ms step are"."""
    return f"{amount(ms)} ms of each {amount(row.step_ms.median)} ms step are"


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
        reason=f"{name_row(case.row)}: {describe_part(case.row, wait)} data loading",
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


def _uneven(row: Row) -> float:
    """Return the largest ratio of samples between two ranks."""
    fewest = max(1, row.global_batch_size // row.workers)
    return -(-row.global_batch_size // row.workers) / fewest

"""Advice on gradient synchronization: larger batches, a communication hook, no search for unused parameters."""

import math
from typing import Any

from pipeline.report import Row
from pipeline.report.row_names import name_row
from pipeline.report.rule import Case, Finding, scaled_rate
from pipeline.report.tables import amount

EXPOSED = 0.2
"""Fraction of a step in exposed communication that is worth a change; tutorials call an efficiency of 80% good."""
SLOW_EXPOSED = 0.25
"""Fraction of a step in exposed communication that is worth sending fewer bits, which loses accuracy."""
SLOW_GBIT, VERY_SLOW_GBIT = 10.0, 1.0
"""Gbit/s below which a link is slow, e.g. Ethernet, and below which half the bits are still too many."""
FEWEST_MB = 1.0
"""Size of gradients below which latency dominates, which sending fewer bits doesn't reduce."""
_KEPT = {"fp16": 0.5, "bf16": 0.5, "powersgd": 0.15}
"""Approximate fraction of the exposed communication that remains with a hook, the hook's own work included.

Measured with 4 MB of gradients on a link of 200 Mbit/s between two CPU workers: 0.5 to 0.7 and 0.12.
"""
_SEARCH = 0.02
"""Assumed cost of the search for unused parameters, not measured; small, so that this advice comes late."""


def larger_batch(case: Case) -> Finding | None:
    """Suggest a larger global batch if gradient synchronization takes much of a step."""
    row, train = case.row, case.experiment.train
    ends_early = row.role == "main" and row.steps < 2 * (train.epochs or 1)  # too few samples for larger batches
    if not _exchange_is_long(case, share=EXPOSED) or row.scaling == "weak" or ends_early:
        return None
    batch = 2 * train.global_batch_size
    values: dict[str, Any] = {**case.experiment.batch_keys(batch)}
    # Keep the size of micro-batches, since memory may not hold larger ones; splitting a whole batch only slows kernels.
    if train.gradient_accumulation > 1:
        values["train.gradient_accumulation"] = 2 * train.gradient_accumulation
    return Finding(
        reason=_exchange(row),
        values=values | scaled_rate(case.experiment, base=train.global_batch_size),
        change="a batch twice as large needs half as many synchronizations; check that the model trains as well",
        gain=row.share_of_communication / 2,
    )


def communication_hook(case: Case) -> Finding | None:
    """Suggest a communication hook, which sends fewer bits, if the link is slow."""
    row, precision = case.row, case.experiment.train.precision
    if row.strategy != "ddp" or row.options.get("communication_hook", "none") != "none" or precision == "fp64":
        return None
    if case.experiment.optimizers:  # which use no hook of DDP
        return None
    # CPU processes on one machine exchange through memory, which fewer bits don't speed up.
    is_local = row.device == "cpu" and len(set(row.parts.nodes)) == 1
    if is_local or row.gradient_mb < FEWEST_MB or not _exchange_is_long(case, share=SLOW_EXPOSED):
        return None
    if (gbit := exchange_gbit(row)) >= SLOW_GBIT:
        return None
    half = "bf16" if row.device == "cuda" else "fp16"
    # PowerSGD's error feedback would keep the infinities of fp16's loss scaling forever.
    hook = "powersgd" if gbit < VERY_SLOW_GBIT and precision != "fp16" else half
    return Finding(
        reason=f"{_exchange(row)}, for {amount(row.gradient_mb)} MiB at about {amount(gbit)} Gbit/s",
        values={"parallel.options.communication_hook": hook},
        change="gradients lose precision, so check that the model still trains as well",
        gain=row.share_of_communication * (1 - _KEPT[hook]),
    )


def unused_search(case: Case) -> Finding | None:
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
    return is_long and case.has_parts


def _exchange(row: Row) -> str:
    exposed, step = row.parts.exposed_communication_ms or 0.0, row.step_ms.median
    return f"{name_row(row)}: {amount(exposed)} ms of each {amount(step)} ms step are exposed communication"

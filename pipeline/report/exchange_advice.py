"""Advice on the exchange of gradients: fewer exchanges, fewer bits, no search."""

import math
from typing import Any

from pipeline.report import Row
from pipeline.report.rule import Case, Finding, scaled_rate
from pipeline.report.tables import amount

EXPOSED = 0.2
"""From this share of a step on, exchange is worth a change: the "80% is a win" of tutorials is this much lost."""
SLOW_EXPOSED = 0.25
"""Sending fewer bits loses accuracy, so it has to be worth more."""
SLOW_GBIT, VERY_SLOW_GBIT = 10.0, 1.0
"""Ethernet of 10 Gbit/s and less; below 1, half the bits are still too many."""
FEWEST_MB = 1.0
"""Less than this is a matter of latency, which sending fewer bits doesn't change."""
_KEPT = {"fp16": 0.5, "bf16": 0.5, "powersgd": 0.15}
"""About the fraction of the exposed exchange that a hook leaves, its own work included: measured with 4 MB of gradients
on a link of 200 Mbit/s between two CPU workers, 0.5 to 0.7 and 0.12."""
_SEARCH = 0.02
"""What the search for unused parameters costs wasn't measured; it is little, so it comes late in the list."""


def larger_batch(case: Case) -> Finding | None:
    """Exchange is much of a step: do it for more samples at a time."""
    row, train = case.row, case.experiment.train
    ends_early = row.role == "main" and row.steps < 2 * train.epochs  # there aren't as many samples
    if not _exchange_is_long(case, share=EXPOSED) or row.scaling == "weak" or ends_early:
        return None
    batch = 2 * train.global_batch_size
    values: dict[str, Any] = {"train.global_batch_size": batch}
    # Who splits a batch has no memory for larger parts; others would only lose by smaller kernels.
    if train.gradient_accumulation > 1:
        values["train.gradient_accumulation"] = 2 * train.gradient_accumulation
    return Finding(
        reason=_exchange(row),
        values=values | scaled_rate(case.experiment, base=train.global_batch_size),
        change="an exchange for twice the samples is half the share; look whether it still trains as well",
        gain=row.share_of_communication / 2,
    )


def communication_hook(case: Case) -> Finding | None:
    """Exchange is slow because the link is: send fewer bits."""
    row, precision = case.row, case.experiment.train.precision
    if row.strategy != "ddp" or row.options.get("communication_hook", "none") != "none" or precision == "fp64":
        return None
    # Processes of one machine exchange through its memory: slow, but not a link that fewer bits would help.
    is_local = row.device == "cpu" and len(set(row.parts.nodes)) == 1
    if is_local or row.gradient_mb < FEWEST_MB or not _exchange_is_long(case, share=SLOW_EXPOSED):
        return None
    if (gbit := exchange_gbit(row)) >= SLOW_GBIT:
        return None
    half = "bf16" if row.device == "cuda" else "fp16"
    # powersgd remembers what it left out, infinities of fp16's loss scaling included, which would never go away.
    hook = "powersgd" if gbit < VERY_SLOW_GBIT and precision != "fp16" else half
    return Finding(
        reason=f"{_exchange(row)}: {amount(row.gradient_mb)} MB at about {amount(gbit)} Gbit/s",
        values={"parallel.options.communication_hook": hook},
        change="it loses bits of the gradients, so look whether it still trains as well",
        gain=row.share_of_communication * (1 - _KEPT[hook]),
    )


def unused_search(case: Case) -> Finding | None:
    """In each step ddp searches for parameters without gradient: there are none, or always the same."""
    row = case.row
    if row.strategy != "ddp" or not row.options.get("find_unused_parameters"):
        return None
    values: dict[str, Any] = {"parallel.options.find_unused_parameters": False}
    found, change = "every parameter got a gradient", "unless other steps skip some"
    if row.unused_parameters:
        values["parallel.options.static_graph"] = True
        found, change = f"{row.unused_parameters} got no gradient", "if these are the same ones in every step"
    return Finding(
        reason=f"{row.title} searches each step for parameters that it doesn't use; {found}",
        values=values,
        change=change,
        gain=_SEARCH,
    )


def exchange_gbit(row: Row) -> float:
    """Gbit/s of each worker's sending, as if all of a ring all-reduce was exposed: the link is no faster than this."""
    sent = 2 * (row.workers - 1) / row.workers * row.gradient_mb * 2**20 * 8
    return sent / (row.parts.exposed_communication_ms or math.inf) / 1e6


def _exchange_is_long(case: Case, *, share: float) -> bool:
    exposed = case.row.parts.exposed_communication_ms
    return exposed is not None and case.row.share_of_communication > share and case.is_clear(exposed)


def _exchange(row: Row) -> str:
    exposed, step = row.parts.exposed_communication_ms or 0.0, row.step_ms.median
    return f"{row.title} spends {amount(exposed)} ms of each step of {amount(step)} ms on exchange of gradients"

"""Six recommendations: a better row, fewer devices, a larger batch, data loading, a straggler, and a slow link.

A change that was measured to be better is recommended; any other change is a suggestion to try, since shared cores,
caches and links may defeat any formula. All look at rows, never at names of models or machines.
"""

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pipeline.experiment.load import override
from pipeline.experiment.schema import Experiment
from pipeline.protocol.trial import CellMeasurement
from pipeline.results import texts
from pipeline.results.breakdown import adds_up, explain_lost_time, find_straggler, format_ms, noise_ms
from pipeline.results.record import Advice
from pipeline.results.speedup import Row, is_wide
from pipeline.results.statements import compare
from pipeline.wording import counted, figure

WORTH = 1.05  # Smallest ratio of throughputs that is worth a change, even if a smaller one exceeds the noise
EXPOSED, SLOW_EXPOSED = 0.2, 0.25
"""Fractions of a step in exposed communication that are worth a larger batch, and sending fewer bits."""
SLOW_GBIT, FEWEST_MB = 10.0, 1.0
"""Gbit/s below which a link is slow, and size of gradients below which latency dominates."""
_KEPT = 0.5
"""Approximate fraction of the exposed communication that remains with a hook: 0.5 to 0.7 on a link of 200 Mbit/s."""
DATA_WAIT = 0.1
"""Fraction of a step in data loading below which there is no advice: the order of loading and computing explains it."""
STRAGGLES = 1.25
"""Ratio to the other ranks' time from which a rank is a straggler; equal machines differ by a few percent."""


class _Finding(NamedTuple):
    gain: float  # Estimated fraction of a step that the change saves
    advice: Advice


def advise(rows: Sequence[Row], own: Row, *, experiment: Experiment, cores: int | None) -> tuple[Advice, ...]:
    """Return what is recommended: what was measured first, then suggestions, by the time that they save."""
    better = _better_row(rows, own, experiment)
    fixes = [*_straggler(own), *_slow_link(own, rows, experiment)]
    if better is not None and any(fix.gain > better.gain for fix in fixes):
        better = None  # the file's row would be faster still
    found = [better] if better is not None else []
    if better is None:
        found += [*fixes, *_larger_batch(own, rows, experiment), *_data_wait(own, experiment, cores)]
    found.sort(key=lambda one: (not one.advice.use, -one.gain))
    return tuple(one.advice for one in found)


def _better_row(rows: Sequence[Row], own: Row, experiment: Experiment) -> _Finding | None:
    """Find the fastest row that is faster beyond noise, or else the smallest that is hardly slower."""
    others = [row for row in rows if row is not own and _is_alternative(row, own)]
    faster = [row for row in others if row.is_faster_than(own, factor=WORTH)]
    smaller = [
        row
        for row in others
        if row.device_count < own.device_count
        and (ratio := own.compare(row)).value < WORTH
        and not is_wide(ratio)
    ]  # fmt: skip
    if faster:
        row = max(faster, key=lambda row: row.rate)
    elif smaller:
        row = min(smaller, key=lambda row: row.device_count)
    else:
        return None
    compared = "" if faster and row.role == "baseline" else compare(row, own)  # which the answer says
    why = explain_lost_time(own, row) if row.device_count < own.device_count else ""
    reason = " ".join(filter(None, [compared, why])) or compare(row, own)
    gain = max(0.0, 1 - own.rate / row.rate)
    overrides = tuple(map(shlex.quote, _overrides_of(row))) or _overrides(_values(row, experiment))
    return _Finding(gain, Advice(use=row.short_name, reason=reason, overrides=overrides))


def _is_alternative(row: Row, own: Row) -> bool:
    """Return True if the row is the same training on other workers."""
    check = row.loss_check
    is_same = row.batch == own.batch and (check is None or check.state != "differs")
    other, trial = row.trial, own.trial
    layouts = [(one.strategy, one.workers, one.cpus_per_worker, dict(one.options)) for one in (other, trial)]
    differs = layouts[0] != layouts[1] or _overrides_of(row) != _overrides_of(own)
    return is_same and differs and not row.is_one_replica_dp


def _overrides_of(row: Row) -> tuple[str, ...]:
    """Return the overrides that make a configuration of a benchmark."""
    return row.trial.overrides if isinstance(row.trial, CellMeasurement) else ()


def _values(row: Row, experiment: Experiment) -> Mapping[str, Any]:
    """Return the keys that change the file's row to this row."""
    parallel, trial = experiment.parallel, row.trial
    values: dict[str, Any] = {"parallel.strategy": trial.strategy, "parallel.workers": trial.workers}
    if dict(trial.options) != dict(parallel.options):
        values["parallel.options"] = dict(trial.options)
    own, declared = trial.cpus_per_worker, parallel.cpus_per_worker
    if trial.device == "cpu" and declared != own and (declared or trial.workers != parallel.workers):
        values["parallel.cpus_per_worker"] = own  # else the cores are divided among another number of workers
    if row.result.micro_batches is not None:  # larger ones had no memory
        values["train.gradient_accumulation"] = row.result.micro_batches
    return values


def _larger_batch(own: Row, rows: Sequence[Row], experiment: Experiment) -> Iterator[_Finding]:
    """Suggest a larger global batch if gradient synchronization takes much of a step."""
    train, is_training = experiment.train, own.role == "main"
    ends_early = is_training and own.result.steps < 2 * (train.epochs or 1)  # too few samples for larger batches
    if not _is_exposed(own, EXPOSED) or ends_early or any(row.batch > own.batch for row in rows):
        return
    values: dict[str, Any] = dict(experiment.batch_keys(2 * train.global_batch_size))
    # Keep the size of micro-batches, since memory may not hold larger ones; splitting a whole batch only slows kernels.
    if train.gradient_accumulation > 1:
        values["train.gradient_accumulation"] = 2 * train.gradient_accumulation
    # Goyal et al. 2017, arXiv 1706.02677 for SGD; Malladi et al. 2022, arXiv 2205.10287 for Adam and its kin
    if train.lr_scaling.rule == "none" and experiment.optimizer is not None:  # of several, each may follow another rule
        rule = "sqrt" if "adam" in experiment.optimizer.target.lower() else "linear"
        values |= {"train.lr_scaling.rule": rule, "train.lr_scaling.base_batch_size": train.global_batch_size}
    yield _suggest("larger batch", own, gain=_share_exposed(own) / 2, values=values)


def _slow_link(own: Row, rows: Sequence[Row], experiment: Experiment) -> Iterator[_Finding]:
    """Suggest a communication hook, which sends fewer bits, if the link is slow."""
    trial, result = own.trial, own.result
    # CPU processes on one machine exchange through memory, which fewer bits don't speed up.
    is_local = trial.device == "cpu" and len(set(result.parts.nodes)) == 1
    has_hook = any(row.trial.options.get("communication_hook", "none") != "none" for row in (own, *rows))
    is_possible = trial.strategy == "ddp" and experiment.train.precision != "fp64" and not experiment.optimizers
    if not is_possible or has_hook or is_local or not _is_exposed(own, SLOW_EXPOSED) or result.gradient_mb < FEWEST_MB:
        return
    # of a ring all-reduce that was exposed as a whole: an upper bound of the link's speed
    sent = 2 * (trial.workers - 1) / trial.workers * result.gradient_mb * 2**20 * 8
    gbit = sent / (result.parts.exposed_communication_ms or math.inf) / 1e6
    if gbit < SLOW_GBIT:
        hook = "bf16" if trial.device == "cuda" else "fp16"
        fields = {"mb": figure(result.gradient_mb, digits=3), "gbit": figure(gbit, digits=2)}
        values = {"parallel.options.communication_hook": hook}
        yield _suggest("slow link", own, fields, gain=_share_exposed(own) * (1 - _KEPT), values=values)


def _straggler(own: Row) -> Iterator[_Finding]:
    """Name a rank that takes clearly longer for its own work than the ranks that wait for it."""
    found, workers = find_straggler(own), own.trial.workers
    uneven = -(-own.batch // workers) / max(1, own.batch // workers)  # of the samples of two ranks
    if found is None or found.ratio < STRAGGLES * uneven:
        return
    if not _is_clear(own, lost := (found.ratio - 1) * found.others_ms):
        return
    fields = {"ms": format_ms(found.ratio * found.others_ms), "others": format_ms(found.others_ms)}
    fields |= {"rank": str(found.rank), "node": found.node}
    yield _suggest("straggler", own, fields, gain=lost / own.step_ms)


def _data_wait(own: Row, experiment: Experiment, cores: int | None) -> Iterator[_Finding]:
    """Suggest more DataLoader workers if steps wait for data."""
    wait, step, now = own.result.parts.data_wait_ms, own.step_ms, experiment.loader.num_workers
    if wait < DATA_WAIT * step or not _is_clear(own, wait) or wait > step:
        return
    nodes = own.result.parts.nodes
    local = max(nodes.count(node) for node in nodes)
    # Reading a batch takes `wait` on top in the training process, or keeps each of `now` processes busy for a step.
    needed = math.ceil((now * step or wait) / max(step - wait, step / 8))
    most = max(2, (cores or 2) // local)
    if (loaders := min(max(needed, now + 1), most)) <= now:
        fields = {"loaders": counted(now, "DataLoader worker"), "cores": counted(most, "core")}
        yield _suggest("slow data", own, fields, gain=wait / step)
        return
    used = local * (own.trial.cpus_per_worker + loaders)
    is_full = own.trial.device == "cpu" and cores is not None and used > cores
    name = "data wait, no idle core" if is_full else "data wait"
    yield _suggest(name, own, gain=wait / step, values={"loader.num_workers": loaders})


def _suggest(
    name: str, own: Row, fields: Mapping[str, str] = {}, *, gain: float, values: Mapping[str, Any] = {}
) -> _Finding:
    """Return a suggestion by the name of its templates."""
    parts = own.result.parts
    known = {
        "name": own.short_name,
        "step": format_ms(own.step_ms),
        "wait": format_ms(parts.data_wait_ms),
        "exposed": format_ms(parts.exposed_communication_ms or 0.0),
    }
    reason, change = (text.format(**known, **fields) for text in texts.ADVICE[name])
    return _Finding(gain, Advice(reason=reason, change=change, overrides=_overrides(values)))


def _overrides(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return keys and values as words for a shell, e.g. "train.global_batch_size=128"."""
    return tuple(shlex.quote(override(key, value)) for key, value in values.items())


def _share_exposed(own: Row) -> float:
    """Return exposed communication as a fraction of the step."""
    return (own.result.parts.exposed_communication_ms or 0.0) / own.step_ms


def _is_exposed(own: Row, least: float) -> bool:
    return _share_exposed(own) > least and _is_clear(own, _share_exposed(own) * own.step_ms) and adds_up(own)


def _is_clear(own: Row, ms: float) -> bool:
    """Return True if a part of a step is longer than the noise of the step.

    The noise counts up to half the step: one disturbed round is no reason to doubt a part that dominates the step.
    """
    return ms > min(noise_ms(own), own.step_ms / 2)

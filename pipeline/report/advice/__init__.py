"""Advice: a few changes to the experiment file, each with the measurement that suggests it.

Another strategy, batch size and learning rate are here, which other rows suggest; `rules` has what one row suggests.
All look at `Row`s, never at names of models or machines. A change that this run measured to be faster is advised; any
other change is a suggestion to try.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pipeline.experiment.schema import Experiment
from pipeline.report.advice import rules
from pipeline.report.advice.rules import Case, Finding, describe_part, scale_rate
from pipeline.report.numbers.old_breakdown import has_consistent_parts
from pipeline.report.numbers.row import Advice, Row
from pipeline.report.report import Report
from pipeline.report.text.claims import compare_rows
from pipeline.report.text.loss_differences import explain_loss
from pipeline.report.text.ratios import is_wide, times
from pipeline.report.text.row_names import count_workers, name_row
from pipeline.report.text.tables import rate

MOST = 5
"""Largest number of recommendations."""
WORTH = 1.05
"""Smallest ratio of throughputs that is worth a change, even if a smaller one exceeds the noise."""
CLOSE = 0.95
"""Fraction of the best throughput from which a throughput counts as close to it."""
_OPTION = "parallel.options."
_TINY_MS = 10.0
"""Compute time of a step below which a model is called small, as any gradient synchronization takes long next to it."""


def advise(report: Report, *, experiment: Experiment, cores: int | None) -> tuple[Advice, ...]:
    """Return at most `MOST` pieces of advice: measured ones first, then suggestions, by the time that they save.

    Args:
        report: report of a run or of a comparison.
        experiment: the experiment as declared in its file.
        cores: number of cores of each node; None if unknown.
    """
    own = find_declared_row(report, experiment)
    found = _findings(report, own, experiment=experiment, cores=cores)
    useful = [one for one in found if one.is_measured or not _is_settled(one, own, rows=report.rows)]
    findings = sorted(useful, key=lambda one: (not one.is_measured, -one.gain))
    return tuple(finding.advice for finding in _agreeing(findings)[:MOST])


def _is_settled(finding: Finding, own: Row, *, rows: Sequence[Row]) -> bool:
    """Return True if another row has the options or the batch size that a finding suggests to try."""
    options = {key.removeprefix(_OPTION): value for key, value in finding.values.items() if key.startswith(_OPTION)}
    batch = finding.values.get("train.global_batch_size", own.global_batch_size)
    if not options and batch == own.global_batch_size:
        return False
    others = (row for row in rows if (row.strategy, row.workers) == (own.strategy, own.workers) and row != own)
    return any(
        row.global_batch_size == batch and all(row.options.get(name) == value for name, value in options.items())
        for row in others
    )


def find_declared_row(report: Report, experiment: Experiment) -> Row:
    """Return the row of the file's ``parallel`` section, or the main row if a comparison didn't measure that."""
    if not report.is_comparison:
        return report.main
    return next(_iter_declared(report.rows, experiment), report.main)


def _iter_declared(rows: Sequence[Row], experiment: Experiment) -> Iterator[Row]:
    """Yield the rows of a comparison that have the file's ``parallel`` section, with any batch size."""
    parallel = experiment.parallel
    wanted = (parallel.strategy, parallel.workers, dict(parallel.options))
    own = (row for row in rows if row.role in ("baseline", "cell"))
    yield from (row for row in own if (row.strategy, row.workers, dict(row.options)) == wanted)


def _findings(report: Report, own: Row, *, experiment: Experiment, cores: int | None) -> Iterator[Finding]:
    """Advise changing to a better row, and then give advice on that row.

    Keep to the declared row if fixing its straggler or its slow link would make it faster than the better row.
    """
    case = Case(row=own, experiment=experiment, cores=cores)
    yield from filter(None, [recommend_batch(case, report.rows)])
    fixable = list(filter(None, [rules.straggler(case), rules.communication_hook(case)]))
    found = better(report.rows, case)
    if found is None or any(1 - finding.gain < found.row_time for finding in fixable):
        yield from fixable
    else:
        yield found.finding
        yield from filter(None, [rules.straggler(case)])
        case = Case(row=found.row, experiment=experiment, cores=cores)
        yield from filter(None, [rules.communication_hook(case)])
    yield from _others(case, report.rows)


def _others(case: Case, rows: Sequence[Row]) -> Iterator[Finding]:
    """Apply the rules that don't depend on a better row."""
    batch = rules.larger_batch(case)  # comes with its own change of the learning rate
    rate = None if batch else recommend_learning_rate(case)
    more = (rules.data_wait(case), rules.find_unused_search(case), rules.idle_cores(case, rows))
    yield from filter(None, [batch, rate, *more, rules.matmul_precision(case)])


def _agreeing(findings: list[Finding]) -> list[Finding]:
    """Drop findings that set a key which an earlier finding sets."""
    kept: list[Finding] = []
    for finding in findings:
        if not any(finding.values.keys() & other.values.keys() for other in kept):
            kept.append(finding)
    return kept


class Better(NamedTuple):
    """A row that is better than the declared row."""

    row: Row
    row_time: float
    """Time per sample as a fraction of the declared row's."""
    finding: Finding


def better(rows: Sequence[Row], case: Case) -> Better | None:
    """Return the fastest row that is faster beyond noise, or else the smallest that is hardly slower, or None."""
    others = [row for row in rows if _is_alternative(row, case.row, baseline=rows[0])]
    faster = [row for row in others if row.is_faster_than(case.row, factor=WORTH)]
    if faster:
        return _better(max(faster, key=lambda row: row.samples_per_second.median), case, is_faster=True)
    smaller = [row for row in others if row.device_count < case.row.device_count]
    smaller = [row for row in smaller if _is_hardly_slower(row, case.row)]
    return _better(min(smaller, key=lambda row: row.device_count), case, is_faster=False) if smaller else None


def _is_alternative(row: Row, own: Row, *, baseline: Row) -> bool:
    """Return True if the row is the same training on other workers."""
    is_explained = row.same_training != "no" or bool(explain_loss(row, baseline))
    trains_the_same = row.global_batch_size == own.global_batch_size and is_explained
    is_another = (row.strategy, row.workers, row.cpus, row.options) != (
        own.strategy, own.workers, own.cpus, own.options
    )  # fmt: skip
    return trains_the_same and is_another and not row.is_one_replica_dp


def _is_hardly_slower(row: Row, other: Row) -> bool:
    """Return True if the other row is not worth its devices, as far as the noise lets one tell."""
    ratio = other.throughput_over(row)
    return ratio.value < WORTH and not is_wide(ratio)


def _better(row: Row, case: Case, *, is_faster: bool) -> Better:
    ratio = row.throughput_over(case.row).value
    exposed = _describe_exposed(row, case.row)
    # the speedup of the declared row has been shown where this is
    compared = "" if row.role == "baseline" and is_faster else compare_rows(row, case.row)
    finding = Finding(
        reason=". ".join(filter(None, [_reason(row, case.row, is_faster=is_faster), exposed])),
        values=_values(row, case),
        gain=max(0.0, 1 - 1 / ratio),
        is_measured=True,
        use=count_workers(row),
        why=" ".join(filter(None, [compared, f"{exposed}." if exposed else ""])),
    )
    return Better(row, 1 / ratio, finding)


def _reason(row: Row, own: Row, *, is_faster: bool) -> str:
    rates = f"{rate(row.samples_per_second)} and {rate(own.samples_per_second)} samples/s"
    sentence = f"{name_row(own)}: not faster than {name_row(row)} beyond the noise ({rates})"
    if is_faster:
        sentence = f"{name_row(row)}: {times(row.throughput_over(own))} as fast as {name_row(own)} ({rates})"
    return (
        f"{sentence}, with {row.devices} instead of {own.devices}" if row.device_count < own.device_count else sentence
    )


def _describe_exposed(row: Row, own: Row) -> str:
    """Say how much of a step fewer workers would save; empty if that is unknown."""
    exposed = own.parts.exposed_communication_ms
    if not exposed or row.workers >= own.workers or not has_consistent_parts(own):
        return ""
    small = own.parts.compute_ms is not None and own.parts.compute_ms < _TINY_MS
    why = "; this model is too small to hide it" if small else ""
    return f"With {count_workers(own)}, {describe_part(own, exposed)} exposed communication{why}"


def _values(row: Row, case: Case) -> dict[str, Any]:
    """Return the keys that change the file's row to this row."""
    parallel = case.experiment.parallel
    values: dict[str, Any] = {"parallel.strategy": row.strategy, "parallel.workers": row.workers}
    if dict(row.options) != dict(parallel.options):
        values["parallel.options"] = dict(row.options)
    cores = row.cpus // row.workers
    if row.device == "cpu" and (row.role == "reference" or parallel.cpus_per_worker not in (None, cores)):
        values["parallel.cpus_per_worker"] = cores
    if row.micro_batches is not None:  # larger ones had no memory
        values["train.gradient_accumulation"] = row.micro_batches
    return values


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
    if size == declared or (size > declared and own is not None and not row.is_faster_than(own)):
        return None
    if not (values := _change(case.experiment, row, size=size)):
        return None
    batch = size * row.replicas * values.get("train.gradient_accumulation", train.gradient_accumulation)
    keeps = not any("batch" in key for key in values)
    kept = "gradient accumulation keeps the global batch size, and so the training"
    other = f"a global batch size of {batch} makes fewer optimizer steps; check that the model trains as well"
    return Finding(
        reason=_reason_for_batch(row, own, declared=declared, size=size),
        values=values,
        change=kept if keeps else other,
        is_measured=True,
        use=name_row(row),
        gain=1 - own.samples_per_second.median / row.samples_per_second.median if own and size > declared else 0.0,
    )


def _find_sizes(experiment: Experiment, rows: Sequence[Row]) -> dict[int, Row]:
    """Return the rows of the declared configuration by the batch size of a device."""
    same = _iter_declared(rows, experiment)
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
        values |= scale_rate(experiment, base=train.global_batch_size)
    return values


def _reason_for_batch(row: Row, own: Row | None, *, declared: int, size: int) -> str:
    best = f"{name_row(row)}: {rate(row.samples_per_second)} samples/s"
    if own is None:
        return f"{best}; the file's batch size per device, {declared}, could not be measured"
    compared = "is the smallest within 5% of the best throughput" if size < declared else "is faster"
    return f"{best} {compared}; the file's {declared} has {rate(own.samples_per_second)}"


def recommend_learning_rate(case: Case) -> Finding | None:
    """Suggest scaling the learning rate if it was chosen for another global batch size."""
    train = case.experiment.train
    scaling = train.lr_scaling
    if "base_batch_size" not in scaling.model_fields_set or train.global_batch_size <= scaling.base_batch_size:
        return None
    reason = f"The global batch size is {train.global_batch_size}, but the learning rate was chosen for"
    values = scale_rate(case.experiment, base=scaling.base_batch_size)
    return Finding(reason=f"{reason} {scaling.base_batch_size}", values=values) if values else None

"""The sentences of a report: verdict, outcome, advice, and caveats that keep figures from misleading."""

import math
from collections.abc import Iterator, Sequence

from pipeline.config.reported import named
from pipeline.protocol import estimates
from pipeline.report import Advice, Row, is_clear
from pipeline.report.loss_differences import describe_losses, describe_share, find_statistics
from pipeline.report.ratios import is_wide, times
from pipeline.report.tables import amount, low_to_high, placed, rate
from pipeline.wording import counted, duration

BUSY = 0.2
"""Cores used by other processes from which they are mentioned."""
_LOSS = "train/loss"
MOST_TIMES = 20
"""Factor on the measuring time beyond which nothing longer is suggested."""


def best(rows: Sequence[Row]) -> Row:
    """Return the row that the result is about.

    For a run this is the main training; for a comparison the cell with the highest speedup, or else the baseline.
    Strong scaling goes before weak scaling, which trains with other global batches.
    """
    if rows[-1].role == "main":
        return rows[-1]
    cells = [row for row in rows if row.role == "cell"]
    return max(cells, key=_merit, default=rows[0])


def verdict(rows: Sequence[Row]) -> str:
    """Return the result in one line: speedup with its interval, final metric, and what is fastest on these devices."""
    main = best(rows)
    return "; ".join([*_claim(main, rows[0]), *_learned(main), *_fastest(main, rows), *_iter_missing_checkpoints(main)])


def _iter_missing_checkpoints(main: Row) -> Iterator[str]:
    """Yield the step of the newest checkpoint if the training ended later."""
    if main.unsaved is not None and main.unsaved.newest != main.steps:
        newest = main.unsaved.newest
        step = "no checkpoint was saved" if newest is None else f"the newest checkpoint is of step {newest:,}"
        yield f"{step}, but the training ended at step {main.steps:,}"


def _iter_unsaved(main: Row) -> Iterator[str]:
    """Yield what became of checkpoints that could not be saved."""
    if main.unsaved is None:
        return
    yield from (f"{one[0].upper()}{one[1:]}." for one in _iter_missing_checkpoints(main))
    chosen = "" if main.best is None else f" {main.best.metric} may have been better in one of them."
    yield f"{counted(main.unsaved.failed, 'checkpoint')} could not be saved: {main.unsaved.reason}.{chosen}"


def _claim(main: Row, baseline: Row) -> Iterator[str]:
    if main.ratio is None:
        yield f"{main.title}: {rate(main.samples_per_second)} samples/s, no speedup claimed"
        return
    noise = "" if main.is_resolved else ", could be noise"
    yield f"{main.title}: {times(main.ratio, confidence=main.confidence)} of {baseline.title}{noise}"
    if main.same_training == "no":
        yield "loss differs from the baseline's (note 1)"


def learned(row: Row) -> str:
    """Return the metric that tells if it learned: that of ``checkpoint.best``, or else of validation, rather no loss.

    Without validation it is the training's loss; empty if there is none.
    """
    metrics = row.metrics
    if row.best is not None and row.best.metric in metrics:
        return row.best.metric
    names = [name for name in metrics if name.startswith("validation/")] or [name for name in metrics if name == _LOSS]
    return min(names, key=lambda name: name.endswith("/loss"), default="")


def _learned(row: Row) -> Iterator[str]:
    if name := learned(row):
        yield f"{name} {row.metrics[name]:.4g}"


def _fastest(main: Row, rows: Sequence[Row]) -> Iterator[str]:
    """Yield the fastest way to train the same batches among those measured in the same rounds, unless it is obvious."""
    others = [row for row in rows if row != main and row.global_batch_size == main.global_batch_size]
    if not others:
        return
    top = max(others, key=lambda row: row.samples_per_second.median)
    ratio = main.throughput_over(top)
    name = f"{placed(top)}, {rate(top.samples_per_second)} samples/s"
    if is_clear(ratio) and ratio.value < 1:
        yield f"fastest here: {name}"
    elif is_clear(ratio) and len(others) > 1:
        yield "fastest here"
    elif ratio.size > 1 and not is_wide(ratio) and top.role != "baseline":
        yield f"equally fast here: {name}"


def outcome(row: Row) -> str:
    """Return final metrics and costs of a training: time to the first step, compile time, peak memory."""
    reached = {name: value for name, value in row.metrics.items() if name.startswith(("validation/", "test/"))}
    reached = reached or {name: value for name, value in row.metrics.items() if name == _LOSS}
    parts = [*named(reached)]
    if row.best is not None:
        parts.append(str(row.best))
    if row.trained_at is not None:
        parts.append(f"trained at {amount(row.trained_at)} samples/s")
    if row.time_to_first_step_s is not None:
        parts.append(f"first step after {row.time_to_first_step_s:.1f} s")
    if row.compile_s is not None:
        parts.append(f"compiled in {row.compile_s:.1f} s")
    if row.peak_memory_mb:
        parts.append(f"peak memory {low_to_high(row.peak_memory_mb)} MB")
    return ", ".join(parts)


def exchange(row: Row) -> Iterator[str]:
    """Yield how long gradients were exchanged while a row trained, and the spikes."""
    if (measured := row.communication) is None:
        return
    exposed = row.parts.exposed_communication_ms
    # measured apart: more than the exchange itself, if buckets are copied or another rank comes late
    waited = "" if exposed is None else f"; a step takes {amount(exposed)} ms longer with it"
    yield f"{amount(measured.ms)} ms in each step, {measured.share:.0%} of its time, also beside computing{waited}"
    if measured.worst is not None:
        yield f"{counted(measured.spikes, 'spike')}, which cost {duration(measured.lost_s)}: {measured.worst.sentence}"


def advised(advice: Sequence[Advice]) -> tuple[str, ...]:
    """Return lines, each with the measurement and the change."""
    return tuple(f"{each.reason.rstrip('.')}: {each.change}" for each in advice)


def _merit(row: Row) -> tuple[bool, bool, float]:
    return row.speedup is not None, row.scaling == "strong", row.speedup or 0.0


def remarks(rows: Sequence[Row], *, main: Row, restricted: str = "") -> Iterator[str]:
    """Yield the caveats of the figures, if there are any; that on the loss of the main row is the first.

    Args:
        rows: all measured rows, the baseline first.
        main: row that the result is about.
        restricted: note on a training that measures nothing; empty if something was to be measured.
    """
    baseline = rows[0]
    yield from describe_losses(rows, main=main)
    if sentences := " ".join(_iter_unsaved(main)):
        yield sentences
    yield from (f"{note[0].upper()}{note[1:]}." for note in main.data_notes)
    if main.same_training != "no":  # else it is a reason of the other loss
        buffers = (describe_share(kind) for kind in main.coupling if kind.startswith("buffer"))
        yield from (
            f"{one[0].upper()}{one[1:]}, and rank 0's is kept: one process trains otherwise." for one in buffers
        )
    if restricted:
        yield f"{restricted}."
    elif baseline.role != "baseline":
        yield "There is no baseline measurement."
    elif main.measures_again(baseline):
        yield f"The main trial and its baseline are both {main.title}."
    if not restricted and all(row.parts.sum_ms is None for row in rows):
        yield "The parts of a step could not be measured."
    if any(row.is_one_replica_dp for row in rows):
        yield "dp with fewer than two GPUs is one replica: nothing runs in parallel."
    yield from (_all_cores(main, row) for row in rows if _has_all_cores(row, main))
    yield from _iter_memory_notes(rows)
    for row in rows:
        if row.role != "reference" and not row.is_resolved:
            yield _describe_unresolved(row, baseline, slots_s=main.slots_s)
    if main.slots_s is not None and 0 < main.speedup_pairs < estimates.LEAST_PAIRS:
        yield (
            f"The speedup was measured in {main.speedup_pairs} pairs of slots only, which took "
            f"{duration(main.slots_s)}: measure.budget_s had no time for more, so its interval is wide."
        )
    if main.other_cores is not None and main.other_cores > BUSY:
        yield (
            f"While the speedup was measured, other processes used {main.other_cores:.1f} cores of the machine; on an "
            "idle one the interval is narrower."
        )
    if any(row.scaling == "weak" for row in rows):
        yield (
            "Weak scaling gives every replica the baseline's batch, so the global batch grows with the replicas: "
            "100% efficiency means that a step takes no longer than the baseline's, and losses can't be compared."
        )


def _iter_memory_notes(rows: Sequence[Row]) -> Iterator[str]:
    """Yield how trials were measured that did not fit into memory next to the training."""
    for row in rows:
        if row.is_alone:
            yield (
                f"{row.title} did not fit into memory next to the training. It was measured after the training had "
                "freed its memory, not in turn."
            )
        if row.micro_batches is not None:
            where = "" if row.is_alone else " next to the training"
            yield (
                f"{row.title}: {counted(row.global_batch_size, 'sample')} at once did not fit into memory{where}. "
                f"Each step has {row.micro_batches} micro-batches, as large as a worker's.{_statistics(row)}"
            )


def _statistics(row: Row) -> str:
    """Name the layers that a row's micro-batches change; empty without any."""
    statistics = find_statistics(row)
    return f" {' and '.join(statistics)} took the statistics of each micro-batch." if statistics else ""


def _describe_unresolved(row: Row, baseline: Row, *, slots_s: float | None) -> str:
    """Return why a speedup is not resolved, and what would resolve it."""
    assert row.ratio is not None
    claim = f"The speedup of {row.title}, {times(row.ratio, confidence=row.confidence)}, is not resolved"
    if row.ratio.size == 0 and row.role == "cell":
        return f"{claim}: it was measured once, which shows no noise; raise --repeats."
    if row.ratio.size == 0 and baseline.micro_batches is not None:  # which pipeline compare has no memory for
        return f"{claim}: it was not measured in turn with the baseline."
    if row.ratio.size == 0:
        return f"{claim}: it was not measured in turn with the baseline; pipeline compare measures both in rounds."
    size = row.ratio.size
    pairs = estimates.pairs_to_resolve(row.ratio, confidence=row.confidence, at_most=MOST_TIMES * size)
    if pairs is None and is_wide(row.ratio):
        return f"{claim}: the machine was too busy with other work to tell; measure again when it is idle."
    if pairs is None:
        return f"{claim}: it could be noise, and is too close to 1 for a longer measurement to tell."
    if slots_s is None:  # a comparison
        return f"{claim}: it could be noise; --repeats {pairs} would tell."
    longer = math.ceil(slots_s * pairs / size / 10) * 10
    return (
        f"{claim}: it could be noise; about {longer - slots_s:.0f} s more would tell: pipeline measure with --budget-s "
        f"{longer}, or measure: {{budget_s: {longer}, pairs: {pairs}}} in the file."
    )


def _has_all_cores(row: Row, main: Row) -> bool:
    """Return True if the row is one replica with all the cores that the main trial divides among several."""
    one_on_cpu = row.role == "reference" and row.device == "cpu" and row.replicas == 1
    return one_on_cpu and main.replicas > 1 and row.cpus >= main.cpus


def _all_cores(main: Row, reference: Row) -> str:
    ratio = main.throughput_over(reference)
    does = f"One process with all {reference.devices} does {rate(reference.samples_per_second)} samples/s"
    separate = "Data parallelism pays when devices are separate."
    if not is_clear(ratio) and is_wide(ratio):
        compared = f"{main.title} does {times(ratio, confidence=main.confidence)} of that"
        return f"{does}, and {compared}: too noisy to say which is faster on this machine. {separate}"
    if not is_clear(ratio):
        return f"{does}: on this machine it and {main.title} are equally fast within the noise. {separate}"
    remark = f"{does}: on this machine {main.title} is {times(ratio, confidence=main.confidence)} that."
    return remark if ratio.low > 1 else f"{remark} {separate}"

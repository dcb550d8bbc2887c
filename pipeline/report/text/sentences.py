"""The sentences of a report: the result, final metrics, and notes that keep numbers from misleading."""

from collections.abc import Iterator, Sequence

from pipeline.experiment.reported import iter_formatted, single_names
from pipeline.protocol import estimates
from pipeline.protocol.trial import QUICK_STEPS
from pipeline.report.numbers.row import Advice, Row, find_main_row
from pipeline.report.text.claims import BUSY, classify_speedup, compare_rows, describe_speedup, explain_doubt
from pipeline.report.text.loss_differences import describe_losses, describe_share, find_statistics
from pipeline.report.text.row_names import name_row
from pipeline.report.text.tables import amount, low_to_high, rate
from pipeline.wording import counted, duration, figure

_LOSS = "train/loss"
_TEST, _VALIDATION = "test/", "validation/"


def describe_result(rows: Sequence[Row], *, is_quick: bool = False) -> str:
    """Return the result in a sentence: the speedup of the main row, or else its first metric or its throughput."""
    main = find_main_row(rows)
    if is_quick:
        return f"{name_row(main)}: quick test passed ({QUICK_STEPS} steps); speedup not measured"
    claim = describe_speedup(main, rows[0]) if main.ratio is not None else _describe_training(main)
    return "; ".join([claim, *_iter_missing_checkpoints(main)])


def find_fastest(rows: Sequence[Row]) -> Row | None:
    """Return the row that is faster than each other row with the baseline's batches beyond the noise, or None.

    Also None if the speedup of that row is not valid.
    """
    same = [row for row in rows if row.global_batch_size == rows[0].global_batch_size]
    top = max(same, key=lambda row: row.samples_per_second.median)
    others = [row for row in same if row != top]
    if classify_speedup(top, rows[0]) == "invalid":
        return None
    return top if others and all(top.is_faster_than(row) for row in others) else None


def iter_metric_names(row: Row) -> Iterator[str]:
    """Yield the metrics of a training in the order of a summary.

    The test set is first, then validation, else the training's loss; in each set the metric of ``checkpoint.best`` is
    first, and the loss is last.
    """
    best = "" if row.best is None else row.best.metric.removeprefix(_VALIDATION)
    names = [name for name in row.metrics if name.startswith((_TEST, _VALIDATION))]
    names = names or [name for name in row.metrics if name == _LOSS]

    def place(name: str) -> tuple[bool, bool, bool]:
        return not name.startswith(_TEST), name.partition("/")[2] != best, name.endswith("/loss")

    yield from sorted(names, key=place)


def describe_outcome(row: Row) -> str:
    """Return final metrics and costs of a training: startup time, compile time, peak memory."""
    parts = [*iter_formatted({name: row.metrics[name] for name in iter_metric_names(row)})]
    if row.best is not None:
        parts.append(str(row.best))
    if row.time_to_first_step_s is not None:
        parts.append(f"startup {row.time_to_first_step_s:.1f} s")
    if row.compile_s is not None:
        parts.append(f"compiled in {row.compile_s:.1f} s")
    if row.peak_memory_mb:
        parts.append(f"peak memory {low_to_high(row.peak_memory_mb)} MiB")
    return ", ".join(parts)


def describe_communication(row: Row) -> Iterator[str]:
    """Yield how long gradients were synchronized while a row trained, and the spikes."""
    if (measured := row.communication) is None:
        return
    yield (
        f"Gradient synchronization took {amount(measured.ms)} ms per step in total, overlapped or not: "
        f"{measured.share:.0%} of a step while it trained."
    )
    if measured.worst is not None and round(measured.lost_s, 1) > 0:
        yield f"{counted(measured.spikes, 'spike')}, which cost {duration(measured.lost_s)}: {measured.worst.sentence}."


def format_advice(advice: Sequence[Advice]) -> tuple[str, ...]:
    """Return lines, each with the measurement and the change."""
    return tuple(f"{each.reason.rstrip('.')}: {each.change}{format_ending(each)}" for each in advice)


def format_ending(advice: Advice) -> str:
    """Return what follows settings that this run has not measured; otherwise an empty text."""
    return "" if advice.measured or not advice.overrides else " (not measured)"


def iter_training_notes(main: Row, more: Sequence[str] = ()) -> Iterator[str]:
    """Yield what happened during a training that changes its result: an early stop, checkpoints that were not saved."""
    if main.stopped_early:
        yield f"Training stopped early, after {main.steps:,} steps: {main.stopped_early}."
    if sentences := " ".join(_iter_unsaved(main)):
        yield sentences
    yield from more


def iter_remarks(rows: Sequence[Row], *, main: Row, restriction: str = "") -> Iterator[str]:
    """Yield notes on the numbers, if there are any; one on the loss of the main row is the first.

    Args:
        rows: all measured rows, the baseline first.
        main: row that the result is about.
        restriction: note on a training that measures nothing; empty if something was to be measured.
    """
    baseline = rows[0]
    yield from describe_losses(rows, main=main)
    yield from (f"{note[0].upper()}{note[1:]}." for note in main.data_notes)
    if main.same_training != "no":  # else it is a reason of the other loss
        buffers = (describe_share(kind) for kind in main.coupling if kind.startswith("buffer"))
        yield from (
            f"{one[0].upper()}{one[1:]}, and only rank 0's copy is saved. Training in one process differs."
            for one in buffers
        )
    if restriction:
        yield f"{restriction}."
    elif baseline.role != "baseline":
        yield "There is no baseline measurement."
    elif main.measures_again(baseline):
        yield f"The training and its baseline are both {name_row(main)}."
    if not restriction and all(row.parts.sum_ms is None for row in rows):
        yield "The step-time breakdown could not be measured."
    if any(row.is_one_replica_dp for row in rows):
        yield "DataParallel (dp) needs at least 2 GPUs. With fewer it runs a single replica and gives no speedup."
    yield from (compare_rows(main, row) for row in rows if _has_all_cores(row, main))
    yield from _iter_memory_notes(rows)
    for row in rows:
        if row.role != "reference" and row.ratio is not None and classify_speedup(row, baseline) == "inconclusive":
            doubt = explain_doubt(row, main=main, baseline=baseline)
            remedy = f" {doubt.remedy} pipeline {doubt.command}" if doubt.command else ""
            yield f"{describe_speedup(row, baseline)}. {doubt.reason}.{remedy}"
    yield from _iter_doubts_of_measurement(rows, main=main)


def _iter_doubts_of_measurement(rows: Sequence[Row], *, main: Row) -> Iterator[str]:
    if main.slots_s is not None and 0 < main.speedup_rounds < estimates.LEAST_PAIRS:
        yield (
            f"Only {main.speedup_rounds} measurement rounds fit into benchmark.time_budget_s (they took "
            f"{duration(main.slots_s)}), so the confidence interval is wide."
        )
    if main.other_cores is not None and main.other_cores > BUSY:
        yield (
            f"Other processes used {main.other_cores:.1f} CPU cores during the measurement. An idle machine gives a "
            "narrower interval."
        )
    if any(row.global_batch_size != rows[0].global_batch_size for row in rows):
        yield (
            "Other batch sizes: the global batch size is the batch size per device times the number of devices and of "
            "micro-batches. Losses are not comparable with the baseline's."
        )


def _describe_training(main: Row) -> str:
    """Return the first metric of a training without a speedup, or else its throughput."""
    name = next(iter(single_names(iter_metric_names(main))), "")
    reached = f"{name} {figure(main.metrics[name])}" if name else f"{rate(main.samples_per_second)} samples/s"
    return f"{name_row(main)}: {reached}; speedup not measured"


def _iter_missing_checkpoints(main: Row) -> Iterator[str]:
    """Yield the step of the latest checkpoint if the training ended later."""
    if main.unsaved is not None and main.unsaved.newest != main.steps:
        newest = main.unsaved.newest
        step = "no checkpoint was saved" if newest is None else f"the latest checkpoint is from step {newest:,}"
        yield f"{step}, but the training ended at step {main.steps:,}"


def _iter_unsaved(main: Row) -> Iterator[str]:
    """Yield what became of checkpoints that could not be saved."""
    if main.unsaved is None:
        return
    yield from (f"{one[0].upper()}{one[1:]}." for one in _iter_missing_checkpoints(main))
    chosen = "" if main.best is None else f" {main.best.metric} may have been better in one of them."
    yield f"{counted(main.unsaved.failed, 'checkpoint')} could not be saved: {main.unsaved.reason}.{chosen}"


def _iter_memory_notes(rows: Sequence[Row]) -> Iterator[str]:
    """Yield how trials were measured that did not fit into memory next to the training."""
    for row in rows:
        if row.micro_batches is not None:
            statistics = find_statistics(row)
            told = f" {' and '.join(statistics)} took the statistics of each micro-batch." if statistics else ""
            yield (
                f"{name_row(row)}: {counted(row.global_batch_size, 'sample')} at once did not fit into memory next to "
                f"the training. Each step has {row.micro_batches} micro-batches, as large as a worker's.{told}"
            )


def _has_all_cores(row: Row, main: Row) -> bool:
    """Return True if the row is one replica with all the cores that the main trial divides among several."""
    one_on_cpu = row.role == "reference" and row.device == "cpu" and row.replicas == 1
    return one_on_cpu and main.replicas > 1 and row.cpus >= main.cpus

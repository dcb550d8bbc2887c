"""The whole story of ``pipeline tune-batch``: one trial that looks for a batch size, and what to write in the file."""

import textwrap

import rich.console
from rich.box import SIMPLE_HEAD
from rich.table import Table

from pipeline.config.load import ExperimentFile
from pipeline.config.schema import Comparison
from pipeline.config.values import Frozen
from pipeline.contract import BatchCandidate, BatchSizes, Spread, Trial
from pipeline.errors import ResourceError, UsageError
from pipeline.execution import execute, explained, launcher_of, prepare
from pipeline.launchers.base import outer_rank
from pipeline.plan import Plan, Planner
from pipeline.recording import provenance
from pipeline.recording.run import recorded
from pipeline.speedup.batch_advice import BatchAdvice, advise
from pipeline.speedup.tables import amount


class Tuned(Frozen):
    """What ``pipeline tune-batch`` found. Batch sizes are samples of one device's micro-batch."""

    candidates: tuple[BatchCandidate, ...]
    largest_that_fits: int | None
    """None if memory never ran out."""
    recommended: int
    """The smallest whose throughput is close to the best."""
    workers: int
    global_batch_size: int
    """The file's."""
    change: tuple[str, ...]
    """Keys of the file with the values that lead to the recommended size; empty if it has them."""


def tune_batch(file: ExperimentFile, *, most: int | None, verbose: bool, terminal: rich.console.Console) -> Tuned:
    """Find the batch size of a device for the experiment as it is declared; the file stays as it is.

    Args:
        file: the experiment.
        most: the largest batch of one device to try; None goes as far as memory or data allow.
        verbose: whether to let the workers' output through.
        terminal: where progress and the result are shown.

    Raises:
        PipelineError: what went wrong, ready to be shown.
    """
    if outer_rank() is not None:
        raise UsageError("pipeline tune-batch starts its workers itself: call it without torchrun")
    plan = make(file, most=most)
    (trial,) = plan.trials
    with recorded(plan, terminal=terminal, tracked=False) as recorder:
        with launcher_of(plan, recorder, verbose=verbose) as launcher:
            execute(trial, launcher=launcher, recorder=recorder, file=file)
        sizes = recorder.batch_sizes
        assert sizes is not None  # the trial has ended well
        if sizes.recommended is None:
            raise ResourceError(_too_small(trial, sizes))
        advice = advise(trial, sizes, recommended=sizes.recommended)
        recorder.summary = "\n".join([advice.reason, *advice.change])
    _show(plan, sizes, advice, terminal=terminal)
    return Tuned(
        candidates=sizes.candidates,
        largest_that_fits=sizes.largest_that_fits,
        recommended=sizes.recommended,
        workers=trial.workers,
        global_batch_size=trial.experiment.train.global_batch_size,
        change=advice.change,
    )


def make(file: ExperimentFile, *, most: int | None) -> Plan:
    """Check what the file names and plan the one trial; starts nothing.

    Raises:
        ExperimentError: the file is wrong.
        ResourceError: the machine or the cluster is too small.
    """
    allowed, resources = prepare(file)
    parallel = file.experiment.parallel
    own = Comparison(strategy=parallel.strategy, workers=parallel.workers, options=parallel.options)
    with explained(file):
        trial = Planner(file.experiment, resources, allowed).trial(own, role="tuning")
    trial = trial.model_copy(update={"max_batch_size": most})
    return Plan(command="tune-batch", experiment=file.experiment, resources=resources, trials=(trial,))


def _too_small(trial: Trial, sizes: BatchSizes) -> str:
    return (
        f"not even a batch of {sizes.candidates[0].batch_size} fits into the memory of each "
        f"{'GPU' if trial.device == 'cuda' else 'worker'}; use a smaller model, smaller samples or more memory"
    )


def _show(plan: Plan, sizes: BatchSizes, advice: BatchAdvice, *, terminal: rich.console.Console) -> None:
    (trial,) = plan.trials
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for name in ("batch of\na device", "global\nbatch", "samples/s", "peak MB\nper rank", ""):
        table.add_column(name, justify="right" if name else "left", vertical="bottom")
    for one in sizes.candidates:
        best = one.batch_size == sizes.recommended
        batch = f"{one.batch_size * trial.replicas:,}"
        rate = _with_spread(one.samples_per_second) if one.samples_per_second else "doesn't fit"
        remarks = [*(["recommended"] if best else []), *(["the file's"] * (one.batch_size == trial.device_batch_size))]
        memory = f"{max(one.peak_memory_mb):,.0f}" if one.peak_memory_mb else ""
        table.add_row(f"{one.batch_size:,}", batch, rate, memory, ", ".join(remarks), style="bold" if best else "")
    opening = f"{plan.experiment.name}: {trial.title}, {provenance.hardware(plan)}"
    terminal.print("", textwrap.fill(opening, 80), "", table, "", sep="\n", markup=False)
    for line in (_largest(sizes), advice.reason):
        terminal.print(textwrap.fill(line, 80), markup=False)
    for line in advice.change:
        terminal.print(f"  {line}", style="bold", markup=False, soft_wrap=True)


def _largest(sizes: BatchSizes) -> str:
    smallest = f"Recommended: {sizes.recommended:,} samples, the smallest within 5 % of the best throughput."
    if sizes.largest_that_fits is not None:
        return f"Largest that fits: {sizes.largest_that_fits:,} samples. {smallest}"
    return f"At least {sizes.candidates[-1].batch_size:,} samples fit: memory never ran out. {smallest}"


def _with_spread(rate: Spread) -> str:
    return f"{amount(rate.median)} ±{(rate.high - rate.low) / 2 / rate.median:.0%}"

"""``pipeline benchmark``: measure configurations in short trainings that alternate, and end in a result.

A configuration is a set of overrides of the file, planned like the training of ``pipeline run``. One that can't run
stays in the table, with the reason.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from pipeline import registry
from pipeline.commands.invocation import Invocation, invoked, planning, refuse_outer_launcher
from pipeline.drive import preflight
from pipeline.errors import ExperimentError, NoMemoryError, PipelineError, ResourceError, TrainingError, UsageError
from pipeline.experiment.load import ExperimentFile, flatten, override
from pipeline.experiment.schema import Configuration, Experiment
from pipeline.experiment.values import Frozen
from pipeline.plan.plan import Plan, Planner
from pipeline.plan.resources import Resources
from pipeline.protocol.trial import Baseline, CellMeasurement, Trial
from pipeline.protocol.trial_result import Link
from pipeline.record import journal
from pipeline.record.screen import Terminal
from pipeline.results import texts
from pipeline.results.benchmarked import is_pair, predict_rows, result_of_benchmark
from pipeline.results.measured import Entry
from pipeline.results.prediction import MOST_WORKERS
from pipeline.results.record import Result
from pipeline.results.speedup import Row, measure_rows, name_configuration
from pipeline.wording import counted, first_line, join_names

_LAYOUT = ("parallel.strategy", "parallel.workers", "parallel.options", "train.batch_size_per_worker")
"""Keys that a trial has resolved, so that they don't tell configurations apart."""
_SHARED = ("name", "tracking", "benchmark", "parallel.launcher", "parallel.address", "train.start_from")
"""Keys that all configurations of a benchmark share."""


class Request(Frozen):
    """Measurements asked for; without strategies, workers and varied keys it is the file's own configuration."""

    strategies: tuple[str, ...] = ()
    workers: tuple[int, ...] = ()
    batch_sizes: tuple[int, ...] = ()  # Batch sizes of a device, to measure the file's configuration with
    vary: tuple[tuple[str, ...], ...] = ()  # Overrides of each variant
    repeats: int = 3  # Number of measurements of each configuration, alternating with the others
    profile: bool = False  # True to record a trace of each configuration's first measurement
    predict: tuple[int, ...] = ()  # Numbers of workers to predict
    network: Link | None = None  # Network between predicted workers; None to measure it between workers of this run


class _Wanted(NamedTuple):
    """A configuration as it is asked for."""

    strategy: str
    workers: int
    varied: tuple[str, ...] = ()
    size: int | None = None  # Batch size of a device; None for the file's


class Cell(NamedTuple):
    """A configuration: the trial that measures it, or the reason why it can't run here."""

    name: str
    label: str  # Name in tables
    trial: Trial | None = None
    reason: str = ""


class Matrix(NamedTuple):
    """Configurations and trials of a benchmark."""

    cells: Sequence[Cell]  # Configurations in the order of the request, the baseline first
    declared: str  # Name of the file's own configuration; empty if it is not measured
    alone: str  # Name of the one worker that predictions are made from; empty without predictions
    plan: Plan  # Trials of the configurations that can run and of the reference, once each, then once each again


def benchmark(
    file: ExperimentFile,
    *,
    request: Request,
    verbose: bool,
    terminal: Terminal,
    show: Callable[[Result, Path], None] | None = None,
) -> None:
    """Measure configurations, and end in a result of what was measured, also if interrupted."""
    refuse_outer_launcher("benchmark")
    check_request(request, file.experiment)
    with planning(file) as (allowed, resources):
        matrix = make_matrix(file, resources, allowed=allowed, request=request)
    reasons = {cell.name: cell.reason for cell in matrix.cells if cell.trial is None}
    failures: list[PipelineError] = []
    with invoked(matrix.plan, file=file, terminal=terminal, verbose=verbose, show=show) as invocation:
        try:
            _measure(invocation, reasons=reasons, failures=failures)
        finally:
            if invocation.results:
                invocation.finish(_make_result(matrix, invocation, reasons=reasons, request=request))
    if failures:
        raise failures[0]


def check_request(request: Request, experiment: Experiment) -> None:
    """Refuse what contradicts itself or the experiment, whatever the machine."""
    if request.network is not None and not request.predict:
        raise UsageError("--network: is used for predictions only. Add --predict, e.g. --predict 8,64.")
    if request.predict and request.vary:
        raise UsageError("--predict: one experiment is predicted. Remove --vary.")
    most = min(MOST_WORKERS, experiment.train.global_batch_size)
    for count in request.predict:
        if not 1 < count <= most:
            limit = "" if most == MOST_WORKERS else ", as many as the global batch has samples"
            raise UsageError(f"--predict: {count!r} workers cannot be predicted. Use 2 to {most:,}{limit}.")
    if request.predict and experiment.optimizers:
        message = "take turns in a step, which the prediction does not cover. Remove --predict."
        raise ExperimentError.of("optimizers", message)
    options = {
        "--strategies": ("parallel.strategy", "parallel.options") if request.strategies else (),
        "--workers": ("parallel.workers",) if request.workers else (),
        "--batch-sizes": ("train.global_batch_size", "train.batch_size_per_worker") if request.batch_sizes else (),
        "the whole benchmark": _SHARED,
    }
    for text in {text for overrides in request.vary for text in overrides}:
        key = text.partition("=")[0]
        for option, keys in options.items():
            if any(f"{key}.".startswith(f"{one}.") or one.startswith(f"{key}.") for one in keys):
                raise UsageError(f"--vary {key}: {option} sets this key, so it can't be varied as well.")
    strategies = request.strategies or (experiment.parallel.strategy, experiment.benchmark.baseline.strategy)
    if max(request.workers, default=1) > 1 and not any(map(_runs_many, strategies)):
        raise UsageError(
            f"--workers: {join_names(sorted({*strategies}))} runs one process. Add e.g. --strategies single,ddp."
        )


def make_matrix(file: ExperimentFile, resources: Resources, *, allowed: tuple[str, ...], request: Request) -> Matrix:
    """Plan the configurations. Every worker of each of them has the same cores."""
    experiment = file.experiment
    for varied in request.vary:
        preflight.check(file.vary({}, *varied))
    wanted = list(_iter_wanted(experiment, request, resources))
    files = {one: _read(file, _overrides(one, experiment)) for one in wanted}
    read = [one.experiment for one in files.values() if isinstance(one, ExperimentFile)]
    base, share = experiment.benchmark.baseline, experiment.parallel.cpus_per_worker or 1
    counts = [_find_declared(one).workers for one in read]
    counts.append(base.workers or (experiment.parallel.workers if _runs_many(base.strategy) else 1))
    most = max((count for count in counts if count * share <= resources.cpus), default=1)
    planner = Planner(experiment, resources, allowed, workers=most)
    baseline = planner.trial(Baseline, base, key="benchmark.baseline")
    label = name_configuration(counted(baseline.workers, "worker"), base.strategy, "baseline")
    cells = [Cell(baseline.name, label, baseline)]

    def plan_trial(own: Experiment, **fields: Any) -> Trial:
        strategy, workers, *_ = _find_declared(own)
        layout = Configuration(strategy=strategy, workers=workers, options=own.parallel.options)
        return Planner(own, resources, allowed, workers=most).trial(CellMeasurement, layout, **fields)

    def find_same(one: _Wanted) -> tuple[Cell, str]:
        cell = _plan_cell(one, files.get(one, file), plan_trial, overrides=_overrides(one, experiment))
        work = cell.trial and _work(cell.trial)
        return cell, next((other.name for other in cells if work and other.trial and _work(other.trial) == work), "")

    for one in wanted:
        cell, same = find_same(one)
        if not same:
            taken = {other.name for other in cells}
            tried = (cell.name, *(f"{cell.name}-{number}" for number in range(2, len(cells) + 2)))
            cells.append(cell._replace(name=next(name for name in tried if name not in taken)))
    trials = [cell.trial.model_copy(update={"name": cell.name}) for cell in cells if cell.trial]
    if baseline.device == "cpu" and resources.is_one_node and any(trial.workers > 1 for trial in trials):
        trials.append(planner.reference())
    alone = find_same(_Wanted("single", 1))[1] if request.predict else ""
    probed = {alone}
    if request.predict and request.network is None:
        pairs = [trial for trial in trials if is_pair(trial, experiment)]
        if not pairs:
            reason = next(cell.reason for cell in reversed(cells) if cell.reason)
            raise ResourceError(texts.NO_NETWORK.format(reason=reason))
        probed.add(max(pairs, key=lambda trial: trial.workers).name)
    rounds = []
    for number, trial in product(range(request.repeats), trials):
        once = {"profile": request.profile and not number, "measures_costs": not number and trial.name in probed}
        rounds.append(trial.model_copy(update={"repeat": number, **once}))
    plan = Plan(command="benchmark", experiment=experiment, resources=resources, trials=tuple(rounds))
    return Matrix(cells, find_same(_find_declared(experiment))[1], alone, plan)


def _iter_wanted(experiment: Experiment, request: Request, resources: Resources) -> Iterator[_Wanted]:
    """Yield the configurations that are asked for, and those that predictions are made from."""
    parallel, declared = experiment.parallel, _find_declared(experiment)
    layouts = [declared] if not (request.strategies or request.workers) else []
    if not layouts:
        for strategy in request.strategies or (experiment.benchmark.baseline.strategy, parallel.strategy):
            counts = (request.workers or (parallel.workers,)) if _runs_many(strategy) else (1,)
            layouts += [_Wanted(strategy, count) for count in counts]
    for varied in request.vary or ((),):
        yield from (layout._replace(varied=varied) for layout in layouts)
        sizes = (None, *request.batch_sizes) if request.batch_sizes else ()
        yield from (declared._replace(varied=varied, size=size) for size in sizes)
    if request.predict:
        yield _Wanted("single", 1)
    if request.predict and request.network is None:
        room = len(resources.gpus) or resources.cpus // (parallel.cpus_per_worker or 1)
        yield _Wanted("ddp", max(2, min(parallel.workers, room)))


def _find_declared(experiment: Experiment) -> _Wanted:
    """Return the configuration of the file itself."""
    parallel = experiment.parallel
    return _Wanted(parallel.strategy, parallel.workers if _runs_many(parallel.strategy) else 1)


def _overrides(wanted: _Wanted, experiment: Experiment) -> tuple[str, ...]:
    """Return the overrides of the file that make a configuration; options and the global batch are the file's."""
    parallel, baseline, train = experiment.parallel, experiment.benchmark.baseline, experiment.train
    written = {baseline.strategy: dict(baseline.options), parallel.strategy: dict(parallel.options)}
    values = {"strategy": wanted.strategy, "workers": wanted.workers, "options": written.get(wanted.strategy, {})}
    now = {"strategy": parallel.strategy, "workers": parallel.workers, "options": dict(parallel.options)}
    changed = {f"parallel.{key}": value for key, value in values.items() if value != now[key]}
    if "parallel.workers" in changed and train.batch_size_per_worker is not None:
        changed |= {"train.batch_size_per_worker": None, "train.global_batch_size": train.global_batch_size}
    return (*wanted.varied, *(override(key, value) for key, value in changed.items()))


def _runs_many(strategy: str) -> bool:
    return bool(registry.load("strategies", strategy).Strategy.processes == "many")


def _read(file: ExperimentFile, overrides: tuple[str, ...]) -> ExperimentFile | str:
    """Return the file with overrides, or why that is no valid experiment."""
    try:
        return file.vary({}, *overrides) if overrides else file
    except ExperimentError as error:
        return _describe_problems(error)


def _describe_problems(error: ExperimentError) -> str:
    return "; ".join(f"{problem.key}: {problem.message}".rstrip(".") for problem in error.problems)


def _plan_cell(
    wanted: _Wanted, file: ExperimentFile | str, plan_trial: Callable[..., Trial], *, overrides: tuple[str, ...]
) -> Cell:
    """Plan a configuration as the training of ``pipeline run`` is planned."""
    strategy, workers, *_ = wanted if isinstance(file, str) else _find_declared(file.experiment)
    hidden = () if isinstance(file, str) else _LAYOUT[:2]
    pairs = [text.partition("=") for text in wanted.varied if not text.startswith(hidden)]
    details = [f"{key.rpartition('.')[2]}={value}" for key, _, value in pairs]
    details += [f"batch {wanted.size}"] if wanted.size is not None else []
    name = re.sub(r"[^\w.]+", "-", "-".join([strategy, str(workers), *details])).strip("-")[:80]  # part of file names
    cell = Cell(name, name_configuration(counted(workers, "worker"), strategy, *details))
    if isinstance(file, str):
        return cell._replace(reason=file)
    plan_trial = partial(plan_trial, name=cell.name, variant=", ".join(details))
    try:
        trial = plan_trial(file.experiment, overrides=overrides)
        if wanted.size is not None and wanted.size != trial.device_batch_size:
            batch = wanted.size * trial.replicas * file.experiment.train.gradient_accumulation
            keys = [override(key, value) for key, value in file.experiment.batch_keys(batch).items()]
            trial = plan_trial(file.vary({}, *keys).experiment, overrides=(*overrides, *keys))
    except ExperimentError as error:
        return cell._replace(reason=_describe_problems(error))
    except ResourceError as error:
        return cell._replace(reason=str(error).removeprefix("parallel.workers: ").rstrip("."))
    return cell._replace(trial=trial)


def _work(trial: Trial) -> tuple[object, ...]:
    """Return what two trials that would measure the same have in common."""
    settings = {key: text for key, text in flatten(trial.experiment).items() if not key.startswith(_LAYOUT)}
    return trial.strategy, trial.workers, dict(trial.options), trial.device, trial.cpus_per_worker, settings


# Measuring


def _measure(invocation: Invocation, *, reasons: dict[str, str], failures: list[PipelineError]) -> None:
    """Run all trials in order; add why a configuration can't be measured, and the errors of those that failed."""
    baseline, out_of_memory, samples = invocation.plan.trials[0], None, None
    with invocation.launching() as execute:
        for trial in invocation.plan.trials:
            has_same_data = trial.experiment.data == baseline.experiment.data
            if samples is not None and has_same_data and (reason := too_small(trial, samples=samples)):
                reasons.setdefault(trial.name, reason)
            if trial.name in reasons:
                continue
            try:
                outcome = execute(trial)
            except NoMemoryError as error:
                reasons[trial.name], out_of_memory = texts.NO_MEMORY, error
            except (TrainingError, ResourceError, ExperimentError) as error:
                if trial.name == baseline.name:
                    raise
                reasons[trial.name] = f"it failed: {first_line(error)}"
                failures.append(error)
                invocation.warn(f"{trial.title}: {error}")
            else:
                if samples is None and outcome.started is not None and has_same_data:
                    samples = outcome.started.epoch_samples
                if samples is not None and (reason := too_small(baseline, samples=samples)):
                    raise invocation.file.explain(ExperimentError.of("data", reason).problems)
    if out_of_memory is not None and not invocation.results:
        raise out_of_memory


def too_small(trial: Trial, *, samples: int) -> str:
    """Return why a training set of that size is too small for a measurement; empty if it isn't."""
    train, measure = trial.experiment.train, trial.experiment.benchmark
    if samples < train.global_batch_size:
        return f"an epoch has {samples:,} samples, fewer than the global batch of {train.global_batch_size:,}"
    steps = train.steps_of(-(-samples // train.global_batch_size))
    if steps < (needed := measure.warmup_steps + measure.steps):
        return (
            f"{samples:,} samples make {counted(steps, 'step')} of {train.global_batch_size:,} in {train.length}; "
            f"a measurement needs {needed}, benchmark.warmup_steps + benchmark.steps: lower those, or train for longer"
        )
    return ""


# What was measured, and what is predicted


def _make_result(matrix: Matrix, invocation: Invocation, *, reasons: Mapping[str, str], request: Request) -> Result:
    """Return the result of what was measured so far."""
    plan, finished = invocation.plan, invocation.finished
    rows = measure_rows(plan.trials, finished, order=[cell.name for cell in matrix.cells])
    by_name = {row.key: row for row in rows}
    counts = Counter(end.result.trial for end in finished)
    is_complete = all(counts[trial.name] == request.repeats or trial.name in reasons for trial in plan.trials)
    entries, missing, notes = list[Row | Entry](), list[str](), list[str]()
    for cell in matrix.cells:
        if cell.name in by_name:
            entries.append(by_name[cell.name])
            continue
        reason = reasons.get(cell.name, texts.NOT_BEGUN)
        entries.append(Entry(cell.name, cell.label, {"samples_per_second": texts.NOT_MEASURED}))
        missing.append(texts.WHY_NOT_MEASURED.format(name=cell.label, reason=reason))
    entries[1:1] = [row for row in rows if row.role == "reference"]
    if request.predict:
        costs = {end.result.trial: end.result.costs for end in finished if end.result.costs is not None}
        has_network = request.network is not None or any(one.world_size > 1 for one in costs.values())
        if matrix.alone in costs and rows[0].role == "baseline" and has_network:
            predicted, notes = predict_rows(
                rows, costs, alone=by_name[matrix.alone], counts=request.predict, network=request.network
            )
            entries += predicted
        else:
            invocation.warn(texts.NO_PREDICTION)
    opened = journal.opened(invocation.folder / journal.FILE_NAME)
    return result_of_benchmark(
        entries,
        declared=by_name.get(matrix.declared),
        hardware=invocation.hardware,
        command=opened.command if opened else "",
        cores=plan.resources.cpus // plan.resources.nodes,
        repeats=request.repeats,
        is_complete=is_complete,
        missing=missing,
        notes=notes,
    )

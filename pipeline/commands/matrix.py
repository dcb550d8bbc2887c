"""Matrix of ``pipeline compare``, made from experiment and resources by a pure function."""

from collections.abc import Iterable, Iterator
from typing import Literal

from pipeline import registry
from pipeline.config.schema import Configuration, Experiment
from pipeline.config.values import Frozen
from pipeline.errors import ExperimentError, ResourceError
from pipeline.planning.layout import Planner
from pipeline.planning.plan import Plan, same_work
from pipeline.planning.resources import Resources
from pipeline.protocol.trial import Baseline, CellMeasurement, Scaling, Trial
from pipeline.wording import format_parallel


class MatrixRequest(Frozen):
    """Request of a user; empty fields come from the experiment's ``compare``."""

    strategies: tuple[str, ...] = ()
    workers: tuple[int, ...] = ()
    scaling: Literal["strong", "weak", "both"] = "strong"
    repeats: int = 3
    """Number of measurements of each cell, alternating with the other cells."""
    profile: bool = False
    """True to record a trace of each cell's first measurement."""


class Cell(Frozen):
    """Cell of the matrix: a trial, or the reason why it can't run here."""

    name: str
    strategy: str
    workers: int
    scaling: Scaling
    trial: Trial | None = None
    reason: str = ""

    @property
    def title(self) -> str:
        """Title in tables."""
        if self.trial:
            return self.trial.title
        return f"{format_parallel(self.strategy, self.workers)}{' (weak)' if self.scaling == 'weak' else ''}"


class Matrix(Frozen):
    """Cells and trials of a comparison."""

    cells: tuple[Cell, ...]
    """Cells in the order of the request, the baseline first."""
    plan: Plan
    """Trials of the cells that can run and of the reference, once each, then once each again."""


def make_matrix(
    experiment: Experiment, resources: Resources, *, allowed: tuple[str, ...], wanted: MatrixRequest
) -> Matrix:
    """Plan the cells of a comparison.

    Every worker of every cell has the same cores. A cell that can't run here is kept, with the reason.

    Raises:
        ExperimentError: the baseline's strategy, launcher and workers don't go together.
        ResourceError: not even the baseline can run here.
    """
    entries = list(_entries(experiment, wanted))
    planner = Planner(experiment, resources, allowed, workers=_most_workers(entries, experiment, resources))
    baseline = planner.trial(Baseline, experiment.benchmark.baseline, key="benchmark.baseline")
    cells = [_cell_of(baseline)]
    for scaling in _scalings(wanted):
        for entry in entries:
            cell = _cell(entry, planner, experiment, scaling=scaling, baseline=baseline)
            if not any(_is_same(cell, other) for other in cells):
                cells.append(cell.model_copy(update={"name": _unique(cell.name, cells)}))
    trials = [cell.trial.model_copy(update={"name": cell.name}) for cell in cells if cell.trial]
    if baseline.device == "cpu" and resources.is_one_node and any(trial.workers > 1 for trial in trials):
        trials.append(planner.reference())
    rounds = [
        trial.model_copy(update={"repeat": repeat, "profile": wanted.profile and repeat == 0})
        for repeat in range(wanted.repeats)
        for trial in trials
    ]
    plan = Plan(command="compare", experiment=experiment, resources=resources, trials=tuple(rounds))
    return Matrix(cells=tuple(cells), plan=plan)


def _entries(experiment: Experiment, wanted: MatrixRequest) -> Iterator[Configuration]:
    """Yield the entries to compare, each with its number of workers."""
    parallel = experiment.parallel
    own = Configuration(strategy=parallel.strategy, workers=parallel.workers, options=parallel.options)
    written = [_counted(entry, parallel.workers) for entry in (*experiment.benchmark.entries.values(), own)]
    if not (wanted.strategies or wanted.workers):
        yield from written
        return
    for strategy in wanted.strategies or dict.fromkeys(entry.strategy for entry in written):
        known = [entry for entry in written if entry.strategy == strategy]
        options = known[0].options if known else {}
        counts = wanted.workers or dict.fromkeys(entry.workers or 1 for entry in known) or (parallel.workers,)
        for workers in counts if _runs_many(strategy) else (1,):
            yield Configuration(strategy=strategy, workers=workers, options=options)


def _counted(entry: Configuration, workers: int) -> Configuration:
    default = workers if _runs_many(entry.strategy) else 1
    return entry.model_copy(update={"workers": entry.workers or default})


def _runs_many(strategy: str) -> bool:
    return bool(registry.load("strategies", strategy).Strategy.processes == "many")


def _most_workers(entries: Iterable[Configuration], experiment: Experiment, resources: Resources) -> int:
    """Return the number of workers of the largest cell that can run, among which the cores are divided."""
    counts = [entry.workers or 1 for entry in entries]
    share = experiment.parallel.cpus_per_worker or 1
    return max((count for count in counts if count * share <= resources.cpus), default=1)


def _scalings(wanted: MatrixRequest) -> tuple[Scaling, ...]:
    return ("strong", "weak") if wanted.scaling == "both" else (wanted.scaling,)


def _cell(entry: Configuration, planner: Planner, experiment: Experiment, *, scaling: Scaling, baseline: Trial) -> Cell:
    workers = entry.workers or 1
    name = f"{entry.strategy}-{workers}{'-weak' if scaling == 'weak' else ''}"
    cell = Cell(name=name, strategy=entry.strategy, workers=workers, scaling=scaling)
    try:
        trial = planner.trial(CellMeasurement, entry, name=name, variant=_variant(entry, experiment))
    except ExperimentError as error:
        return cell.model_copy(update={"reason": "; ".join(problem.message for problem in error.problems)})
    except ResourceError as error:
        return cell.model_copy(update={"reason": str(error).removeprefix("parallel.workers: ")})
    if scaling == "weak":
        trial = _weak(trial, baseline)
    batch = trial.experiment.train.global_batch_size
    if batch < trial.workers:
        return cell.model_copy(update={"reason": f"{workers} workers can't share a global batch of {batch} samples"})
    return cell.model_copy(update={"trial": trial})


def _cell_of(baseline: Trial) -> Cell:
    return Cell(
        name=baseline.name, strategy=baseline.strategy, workers=baseline.workers, scaling="strong", trial=baseline
    )


def _weak(trial: CellMeasurement, baseline: Trial) -> CellMeasurement:
    """Return the trial with the baseline's samples for each replica."""
    train = trial.experiment.train
    batch = train.global_batch_size * trial.replicas // baseline.replicas
    size = {"global_batch_size": batch, "batch_size_per_worker": None}
    experiment = trial.experiment.model_copy(update={"train": train.model_copy(update=size)})
    return trial.model_copy(update={"experiment": experiment, "scaling": "weak"})


def _variant(entry: Configuration, experiment: Experiment) -> str:
    """Return the options in which an entry differs from ``parallel``."""
    own = experiment.parallel.options if entry.strategy == experiment.parallel.strategy else {}
    changed = {name: value for name, value in entry.options.items() if own.get(name) != value}
    changed |= {name: "default" for name in own if name not in entry.options}
    return ", ".join(name if value is True else f"{name}={value}" for name, value in changed.items())


def _is_same(cell: Cell, other: Cell) -> bool:
    """Return True if two cells would measure the same."""
    if cell.trial is None or other.trial is None:
        return cell.model_dump(exclude={"reason"}) == other.model_dump(exclude={"reason"})
    batches = [one.trial.experiment.train.global_batch_size for one in (cell, other) if one.trial]
    return same_work(cell.trial, other.trial) and batches[0] == batches[1]


def _unique(name: str, cells: list[Cell]) -> str:
    names = {cell.name for cell in cells}
    return next(tried for tried in (name, *(f"{name}-{i}" for i in range(2, len(cells) + 2))) if tried not in names)

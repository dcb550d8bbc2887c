"""Matrix of ``pipeline benchmark``, made from experiment and resources by a pure function."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial

from pipeline import registry
from pipeline.commands.benchmark.predicted_rows import check_predictable, find_pair, is_pair
from pipeline.errors import ExperimentError, ResourceError
from pipeline.experiment.schema import Configuration, Experiment
from pipeline.experiment.values import Frozen
from pipeline.plan.plan import Plan, Planner, same_work
from pipeline.plan.resources import Resources
from pipeline.protocol.trial import Baseline, CellMeasurement, Trial
from pipeline.protocol.trial_result import Link
from pipeline.wording import format_parallel

_ALONE = Configuration(strategy="single", workers=1)


class MatrixRequest(Frozen):
    """Request of a user; empty fields come from the experiment's ``benchmark``."""

    strategies: tuple[str, ...] = ()
    workers: tuple[int, ...] = ()
    repeats: int = 3
    """Number of measurements of each cell, alternating with the other cells."""
    profile: bool = False
    """True to record a trace of each cell's first measurement."""
    batch_sizes: tuple[int, ...] = ()
    """Batch sizes of a device to measure the declared configuration with."""
    predict: tuple[int, ...] = ()
    """Numbers of workers to predict."""
    network: Link | None = None
    """Network between predicted workers; None to measure it between workers of this run."""


class Cell(Frozen):
    """Cell of the matrix: a trial, or the reason why it can't run here."""

    name: str
    strategy: str
    workers: int
    batch_size: int | None = None
    """Batch size of each device, if the request names it."""
    trial: Trial | None = None
    reason: str = ""

    @property
    def title(self) -> str:
        """Title in tables."""
        if self.trial:
            return self.trial.title
        listed = f" (batch {self.batch_size})" if self.batch_size else ""
        return f"{format_parallel(self.strategy, self.workers)}{listed}"


class Matrix(Frozen):
    """Cells and trials of a benchmark."""

    cells: tuple[Cell, ...]
    """Cells in the order of the request, the baseline first."""
    alone: str
    """Name of the cell of one worker that predictions are made from; empty without predictions."""
    wanted: MatrixRequest
    plan: Plan
    """Trials of the cells that can run and of the reference, once each, then once each again."""


def make_matrix(
    experiment: Experiment, resources: Resources, *, allowed: tuple[str, ...], wanted: MatrixRequest
) -> Matrix:
    """Plan the cells of a benchmark.

    Every worker of every cell has the same cores. A cell that can't run here is kept, with the reason.

    Raises:
        ExperimentError: the baseline's strategy, launcher and workers don't go together.
        ResourceError: not even the baseline can run here.
    """
    entries = list(_entries(experiment, wanted))
    extras = list(_extras(entries, experiment, resources, wanted=wanted))
    planner = Planner(experiment, resources, allowed, workers=_most_workers([*entries, *extras], experiment, resources))
    baseline = planner.trial(Baseline, experiment.benchmark.baseline, key="benchmark.baseline")
    cell_of = partial(_cell, planner=planner, experiment=experiment)
    table = _Table(baseline)
    for entry in (*entries, *extras):
        table.add(cell_of(entry))
    declared = table.name_as_added(cell_of(_find_declared(experiment)))
    for size in wanted.batch_sizes:
        table.add(batch_cell(declared, size))
    alone = table.name_as_added(cell_of(_ALONE)).name if wanted.predict else ""
    trials = [cell.trial.model_copy(update={"name": cell.name}) for cell in table.cells if cell.trial]
    if baseline.device == "cpu" and resources.is_one_node and any(trial.workers > 1 for trial in trials):
        trials.append(planner.reference())
    probed = {alone, _find_pair(table.cells, experiment, wanted)}
    rounds = [
        _repeat(trial, number=number, wanted=wanted, probed=probed)
        for number in range(wanted.repeats)
        for trial in trials
    ]
    plan = Plan(command="benchmark", experiment=experiment, resources=resources, trials=tuple(rounds))
    return Matrix(cells=tuple(table.cells), alone=alone, wanted=wanted, plan=plan)


class _Table:
    """The cells of a matrix, each once and with a name of its own."""

    def __init__(self, baseline: Trial) -> None:
        self.cells = [_cell_of(baseline)]

    def add(self, cell: Cell) -> None:
        """Add a cell unless another one would measure the same."""
        if self._find(cell) is None:
            self.cells.append(cell.model_copy(update={"name": _unique(cell.name, self.cells)}))

    def name_as_added(self, cell: Cell) -> Cell:
        """Return a cell with the name of the one in the table that measures the same, if there is one."""
        same = self._find(cell)
        return cell.model_copy(update={"name": same.name}) if same else cell

    def _find(self, cell: Cell) -> Cell | None:
        return next((other for other in self.cells if _is_same(cell, other)), None)


def _repeat(trial: Trial, *, number: int, wanted: MatrixRequest, probed: Collection[str]) -> Trial:
    """Return the trial of a round; what is measured once is part of the first round."""
    is_first = number == 0
    once = {"profile": wanted.profile and is_first, "measures_costs": is_first and trial.name in probed}
    return trial.model_copy(update={"repeat": number, **once})


def _extras(
    entries: Sequence[Configuration], experiment: Experiment, resources: Resources, *, wanted: MatrixRequest
) -> Iterator[Configuration]:
    """Yield what is measured in addition to the requested entries, for batch sizes and for predictions.

    Raises:
        ExperimentError: there is no prediction for the experiment.
        ResourceError: no two workers fit, between which the network could be measured.
    """
    if wanted.batch_sizes:
        yield _find_declared(experiment)
    if wanted.predict:
        check_predictable(experiment)
        yield _ALONE
        if wanted.network is None:
            yield from find_pair(entries, experiment, resources)


def _find_pair(cells: Sequence[Cell], experiment: Experiment, wanted: MatrixRequest) -> str:
    """Return the name of the largest cell between whose workers the network is measured; empty if it is given."""
    if not wanted.predict or wanted.network is not None:
        return ""
    pairs = [cell for cell in cells if cell.trial and is_pair(cell.trial, experiment)]
    return max(pairs, key=lambda cell: cell.workers).name if pairs else ""


def batch_cell(declared: Cell, size: int) -> Cell:
    """Return the cell of the declared configuration with another batch size of each device."""
    if (trial := declared.trial) is not None and size == trial.device_batch_size:
        return declared
    cell = {"name": f"{declared.strategy}-{declared.workers}-batch-{size}", "batch_size": size}
    if trial is not None:
        batch = size * trial.replicas * trial.experiment.train.gradient_accumulation
        own = {"experiment": _set_batch_size(trial.experiment, batch), "variant": f"batch {size}"}
        cell["trial"] = trial.model_copy(update=own)
    return declared.model_copy(update=cell)


def _find_declared(experiment: Experiment) -> Configuration:
    parallel = experiment.parallel
    own = Configuration(strategy=parallel.strategy, workers=parallel.workers, options=parallel.options)
    return _fill_in_workers(own, parallel.workers)


def _entries(experiment: Experiment, wanted: MatrixRequest) -> Iterator[Configuration]:
    """Yield the entries to compare, each with its number of workers."""
    parallel = experiment.parallel
    written = [_fill_in_workers(experiment.benchmark.baseline, parallel.workers), _find_declared(experiment)]
    if not (wanted.strategies or wanted.workers):
        yield from written
        return
    for strategy in wanted.strategies or dict.fromkeys(entry.strategy for entry in written):
        known = [entry for entry in written if entry.strategy == strategy]
        options = known[0].options if known else {}
        counts = wanted.workers or dict.fromkeys(entry.workers or 1 for entry in known) or (parallel.workers,)
        for workers in counts if _runs_many(strategy) else (1,):
            yield Configuration(strategy=strategy, workers=workers, options=options)


def _fill_in_workers(entry: Configuration, workers: int) -> Configuration:
    default = workers if _runs_many(entry.strategy) else 1
    return entry.model_copy(update={"workers": entry.workers or default})


def _runs_many(strategy: str) -> bool:
    return bool(registry.load("strategies", strategy).Strategy.processes == "many")


def _most_workers(entries: Iterable[Configuration], experiment: Experiment, resources: Resources) -> int:
    """Return the number of workers of the largest cell that can run, among which the cores are divided."""
    counts = [entry.workers or 1 for entry in entries]
    share = experiment.parallel.cpus_per_worker or 1
    return max((count for count in counts if count * share <= resources.cpus), default=1)


def _cell(entry: Configuration, *, planner: Planner, experiment: Experiment) -> Cell:
    workers = entry.workers or 1
    name = f"{entry.strategy}-{workers}"
    cell = Cell(name=name, strategy=entry.strategy, workers=workers)
    try:
        trial = planner.trial(CellMeasurement, entry, name=name, variant=_variant(entry, experiment))
    except ExperimentError as error:
        return cell.model_copy(update={"reason": "; ".join(problem.message for problem in error.problems)})
    except ResourceError as error:
        return cell.model_copy(update={"reason": str(error).removeprefix("parallel.workers: ")})
    batch = trial.experiment.train.global_batch_size
    if batch < trial.workers:
        return cell.model_copy(update={"reason": f"{workers} workers can't share a global batch of {batch} samples"})
    return cell.model_copy(update={"trial": trial})


def _cell_of(baseline: Trial) -> Cell:
    return Cell(name=baseline.name, strategy=baseline.strategy, workers=baseline.workers, trial=baseline)


def _set_batch_size(experiment: Experiment, batch: int) -> Experiment:
    size = {"global_batch_size": batch, "batch_size_per_worker": None}
    return experiment.model_copy(update={"train": experiment.train.model_copy(update=size)})


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


def _unique(name: str, cells: Sequence[Cell]) -> str:
    names = {cell.name for cell in cells}
    return next(tried for tried in (name, *(f"{name}-{i}" for i in range(2, len(cells) + 2))) if tried not in names)

"""The path shared by run, benchmark and sweep: a recorded command, from its plan to the result that it ends in.

What these commands plan and measure is in their own files.
"""

import logging
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

from pipeline import registry
from pipeline.drive import preflight
from pipeline.drive.checkpoints import directions, find_initial
from pipeline.drive.execute import execute, explain_problems
from pipeline.drive.recorded_run import Membership, artifact, is_complete, recorded
from pipeline.errors import ExperimentError, TrainingError, UsageError
from pipeline.experiment.load import ExperimentFile
from pipeline.experiment.uris import without_credentials_in
from pipeline.launch.base import Launcher, Session
from pipeline.plan.outer_launcher import outer_launcher
from pipeline.plan.plan import Plan
from pipeline.plan.resources import Resources
from pipeline.protocol.events import AnyEvent, Finished, Metrics, Outcome, Point, Tagged, TrialOpened
from pipeline.protocol.trial import Trial, Weights
from pipeline.protocol.trial_result import MEASURED, STARTUP, TrialResult
from pipeline.record import journal, loss_file, provenance, runs
from pipeline.record.folder import ENVIRONMENT_NAME, EXPERIMENT_NAME, id_of, is_kept
from pipeline.record.journal import FILE_NAME, read
from pipeline.record.recorder import Recorder
from pipeline.record.screen import Terminal, linked, write
from pipeline.results import page, record
from pipeline.results.goodput import Goodput, WallClock
from pipeline.results.page import FILE_NAME as PAGE_NAME
from pipeline.results.page import render
from pipeline.results.record import Result
from pipeline.results.terminal import print_result
from pipeline.system import begin_stage, uncollected
from pipeline.tracking import loggers
from pipeline.tracking.store import TrackingOutcome, is_server, places_of, resolve_uri, run_page, ui_address

TABLE_NAME = "speedup_table.json"  # Table of a result's facts in MLflow's format
_RUNS, _STORE = Path("runs"), "sqlite:///mlflow.db"
"""Folder in which commands look for runs by their name, and store that ``pipeline ui`` opens, by default."""
_MOST_CURVES = 10
_OF_STEPS = ("train/", "validation/", "test/")  # Beginnings of the metrics that a training has logged itself
_PACKAGES = ("ddp-pipeline", "torch", "torchmetrics", "ray", "mlflow", "numpy")
_log = logging.getLogger(__name__)


def refuse_outer_launcher(command: str) -> None:
    """Raise UsageError in a process that ``torchrun`` or ``srun`` started as one of several."""
    if (outer := outer_launcher()) is not None:
        raise UsageError(f"pipeline {command} starts its workers itself: call it without {outer.name}")


@contextmanager
def planning(file: ExperimentFile, *, resumes: bool = False) -> Iterator[tuple[tuple[str, ...], Resources]]:
    """Check the file, yield the packages that it may name and the resources; give problems their line in the file.

    A run that ``resumes`` has its weights from a checkpoint, so those that it started from may be gone.
    """
    begin_stage("importing torch, checking the experiment")
    allowed, parallel = preflight.check(file, with_weights=not resumes), file.experiment.parallel
    if parallel.launcher == "ray" and parallel.cluster:
        begin_stage(f"connecting to Ray at {parallel.cluster}")
    resources = registry.load("launchers", parallel.launcher).Launcher.resources(parallel)
    with explain_problems(file):
        yield allowed, resources


class _Results:
    """Ends of a run's trials, those of earlier sessions included. A recorder's subscriber."""

    def __init__(self, earlier: Iterable[Finished]) -> None:
        self.finished = list(earlier)

    def receive(self, event: AnyEvent) -> None:
        """Keep the end of a trial; of a trial that is launched again only the new end counts."""
        match event:
            case TrialOpened():
                again = (event.trial, event.repeat)
                self.finished = [end for end in self.finished if (end.result.trial, end.result.repeat) != again]
            case Finished():
                self.finished.append(event)


@dataclass(frozen=True)
class Invocation:
    """A command under way."""

    file: ExperimentFile
    plan: Plan
    recorder: Recorder
    terminal: Terminal  # Console for progress, warnings and the report
    verbose: bool  # True if the workers' output is passed through to the terminal
    _initial: Weights | None
    _results: _Results
    _clock: WallClock
    _shown: list[Result]

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return self.recorder.folder

    @property
    def hardware(self) -> str:
        """Hardware of the run in one line."""
        return provenance.hardware(self.plan)

    @property
    def results(self) -> dict[str, TrialResult]:
        """Results of the finished trials by name; of repeats, the last."""
        return {end.result.trial: end.result for end in self.finished}

    @property
    def finished(self) -> Sequence[Finished]:
        """Ends of the trials so far, those of earlier sessions included."""
        return self._results.finished

    @property
    def goodput(self) -> Goodput | None:
        """Use of the training's wall clock so far, earlier sessions included; None before its first report."""
        return self._clock.goodput

    @contextmanager
    def launching(self) -> Iterator[Callable[[Trial], Outcome]]:
        """Hold the plan's launcher; yield a function that runs one trial to its end, see `execute`."""
        parallel = self.plan.experiment.parallel
        kind: type[Launcher] = registry.load("launchers", parallel.launcher).Launcher
        session = Session(folder=self.folder, receive=self.recorder.receive, parallel=parallel, verbose=self.verbose)
        begin_stage("preparing the workers")
        with kind(session) as launcher:
            yield partial(execute, launcher=launcher, recorder=self.recorder, file=self.file, initial=self._initial)

    def execute(self, trials: Iterable[Trial]) -> list[Outcome]:
        """Run trials to their end, one after another."""
        with self.launching() as execute_trial:
            return [execute_trial(trial) for trial in trials]

    def warn(self, message: str) -> None:
        """Print a warning."""
        write(self.terminal.warnings, message, style="yellow")

    def log(self, figures: Mapping[str, float | None], *, trial: str = "main", step: int, epoch: int) -> None:
        """Record the figures that are known as metrics of a trial."""
        if points := tuple(Point(name, step, value) for name, value in figures.items() if value is not None):
            self.recorder.receive(Metrics(trial=trial, step=step, epoch=epoch, points=points))

    def finish(self, result: Result, *, draws: bool = True) -> None:
        """Save and record the result that the command ends in, to be shown once the run is closed."""
        self.recorder.summary = record.mlflow_description(result)
        if draws:
            begin_stage("drawing the report")
            path = self.folder / PAGE_NAME
            try:
                with uncollected():
                    path.write_text(_render_page(result, self.folder), encoding="utf-8")
                artifact(PAGE_NAME, self.recorder)
            except Exception as error:  # noqa: BLE001 - nothing about a page may cost the result
                _log.warning("%s could not be written", path, exc_info=error)
                self.warn(f"{path} could not be written: {type(error).__name__}: {error}")
        result = result.model_copy(update={"run": id_of(self.folder), "places": find_places(self.folder)})
        self._shown.append(result)
        ends = Counter(end.result.trial for end in self.finished)
        at = {"main": (0, 0)} | {name: (one.steps, one.epochs) for name, one in self.results.items()}
        logged = {*MEASURED, STARTUP}  # at the end of the trial itself
        for trial, figures in record.mlflow_metrics(result).items():
            if trial not in at:  # predicted
                continue
            step, epoch = at[trial]
            known = logged if ends[trial] == 1 else set()  # of repeats, their means
            new = {name: value for name, value in figures.items() if not name.startswith(_OF_STEPS)}
            self.log({name: new[name] for name in new if name not in known}, trial=trial, step=step, epoch=epoch)
        for trial, tags in record.mlflow_tags(result).items():
            if trial in at:
                self.recorder.receive(Tagged(run=id_of(self.folder), trial=trial, tags=tags))
        if draws and result.all_facts:
            (self.folder / TABLE_NAME).write_text(record.mlflow_table(result), encoding="utf-8")
            artifact(TABLE_NAME, self.recorder)
        record.save(result, self.folder)
        artifact(record.FILE_NAME, self.recorder)


@contextmanager
def invoked(
    plan: Plan,
    *,
    file: ExperimentFile,
    terminal: Terminal,
    verbose: bool,
    folder: Path | None = None,
    member: Membership | None = None,
    again: Sequence[str] = (),
    adds: bool = False,
    show: Callable[[Result, Path], None] | None = None,
) -> Iterator[Invocation]:
    """Print a plan's notes, record what happens inside, and print the result; for other arguments see `recorded`.

    ``show`` gets the result, as it is saved, and the run's folder.
    ``again`` is the verb, with its options, that continues the run after an interruption; empty if none does.
    """
    for note in plan.notes:
        write(terminal.warnings, f"note: {note}")
    initial: Weights | None = None
    with suppress(ExperimentError) if folder is not None else nullcontext():  # they may be gone, see `planning`
        initial = find_initial(plan.experiment)
    shown: list[Result] = []
    folders: list[Path] = []
    try:
        with recorded(
            plan,
            terminal=terminal,
            folder=folder,
            member=member,
            source=file.source,
            directions=directions(plan.experiment, allowed=plan.main.allowed),
            adds=adds,
        ) as recorder:
            results = _Results(recorder.earlier)
            folders.append(recorder.folder)
            if not adds:  # the result and the page of an earlier session, whose run is resumed
                for name in (record.FILE_NAME, PAGE_NAME):
                    (recorder.folder / name).unlink(missing_ok=True)
            clock = WallClock(plan.main.name, read(recorder.folder / FILE_NAME))
            with recorder.subscribed(results), recorder.subscribed(clock):
                try:
                    yield Invocation(file, plan, recorder, terminal, verbose, initial, results, clock, shown)
                except (KeyboardInterrupt, TrainingError) as error:
                    if again and is_kept(recorder.folder):
                        note = explain_way_on(error, again, plan, file=file, folder=recorder.folder)
                        error.add_note(note) if note else None
                    raise
    finally:
        for ended in folders if not adds else ():  # what is added has an end of its own
            if shown:
                last = shown[-1].model_copy(update={"places": find_places(ended)})  # once MLflow has answered
                with suppress(OSError):  # the disk is full: the error says so
                    record.save(last, ended)
                print_result(last, terminal=terminal, is_verbose=verbose)
                if show is not None:
                    show(last, ended)
            elif not terminal.progress.quiet and is_kept(ended):  # else the error names the folder
                with suppress(OSError, UsageError):  # the folder is gone, or the disk is full: the error says so
                    terminal.result.print(linked(places_of(ended)), soft_wrap=True)


def explain_way_on(
    error: KeyboardInterrupt | TrainingError, verb: Sequence[str], plan: Plan, *, file: ExperimentFile, folder: Path
) -> str:
    """Return how to go on with a run that made a step: after a failure of its own training, from a checkpoint."""
    way = way_on(verb, file=file, run=folder.name)
    if is_complete(plan, folder):
        if (folder / record.FILE_NAME).is_file():
            return f"the training is complete; see it with: pipeline show {folder}"
        return f"the training is complete, only its report is missing; {way}"
    if isinstance(error, KeyboardInterrupt) and file.experiment.checkpoint.keep == 0:
        return "there is no checkpoint to continue from, since checkpoint.keep is 0"
    has_checkpoint = any(True for _ in journal.marked(folder / FILE_NAME, "checkpoint_saved"))
    return way if isinstance(error, KeyboardInterrupt) or has_checkpoint or outer_launcher() is not None else ""


def way_on(verb: Sequence[str], *, file: ExperimentFile, run: str) -> str:
    """Return how to continue a run: the whole command, unless a script, an outer launcher or a job started it.

    ``verb`` is the command that continues the run with ``--resume``, with its options.
    """
    if not file.source:
        return f"continue it with resume={run!r}"
    if outer_launcher() is not None or file.experiment.parallel.address == "auto":
        return f"continue it with --resume {run}"
    name, *options = verb
    overrides = map(without_credentials_in, file.overrides)
    return f"continue it with: pipeline {shlex.join([name, str(file.path), *overrides, *options, '--resume', run])}"


def find_places(folder: Path) -> tuple[tuple[str, str], ...]:
    """Return where a run's results are, and the commands that show more, as `Result.places` has them."""
    run = str(folder)
    with suppress(OSError, UsageError):
        part = id_of(folder).rpartition("-")[2]  # not "latest", which soon is another run
        run = part if runs.find(part, _RUNS).samefile(folder) else run
    has_page = (folder / PAGE_NAME).is_file()
    places = [("Report", str(folder / PAGE_NAME)) if has_page else ("Folder", str(folder))]
    more, mlflow = f"pipeline show {shlex.quote(run)} --full", _describe_store(folder)
    together = f"{more}    MLflow: {mlflow}"
    if mlflow and len(together) <= 71:
        places.append(("More", together))
    else:
        places += [("More", more), *([("MLflow", mlflow)] if mlflow else [])]
    return (*places, *(("", line) for line in loggers.places(folder)))


def _describe_store(folder: Path) -> str:
    """Return how to open a run in MLflow; empty if MLflow does not have it."""
    outcome = TrackingOutcome.read(folder)
    if outcome is None or not outcome.run_id:
        return ""
    opened = journal.opened(folder / FILE_NAME)
    uri = outcome.uri or (opened.tracking_uri if opened else "")
    if is_server(uri):
        return ui_address(uri)
    return "pipeline ui" if uri == resolve_uri(_STORE, base=Path.cwd()) else f"pipeline ui --store {uri}"


def _render_page(result: Result, folder: Path) -> str:
    """Return the page of a result with the figures that its run's folder has; a sweep's trials are in folders of it."""
    trials = [folder / fact.trial for fact in result.all_facts if (folder / fact.trial / FILE_NAME).is_file()]
    courses = [
        page.read_course(each.name if trials else "training", losses, read(each / FILE_NAME))
        for each in trials[:_MOST_CURVES] or [folder]
        if (losses := loss_file.read(each))
    ]
    return render(result, about=_describe_run(folder), figures=list(page.iter_figures(result, courses)))


def _describe_run(folder: Path) -> dict[str, str]:
    """Return the facts that a run's folder holds, for its page."""
    opened, known = journal.opened(folder / FILE_NAME), TrackingOutcome.read(folder)
    if opened is None:
        return {}
    uri = (known.uri if known else "") or opened.tracking_uri
    link = run_page(ui_address(uri), known.experiment_id, known.run_id) if known and known.run_id else ""
    environment, experiment = (
        path.read_text(encoding="utf-8") if path.is_file() else ""
        for path in (folder / ENVIRONMENT_NAME, folder / EXPERIMENT_NAME)
    )
    first, *packages = environment.splitlines() or [""]
    installed = dict(line.split("==", 1) for line in packages if "==" in line)
    commit = opened.tags.get("git_commit", "")[:12]
    is_dirty = ", with changes" if opened.tags.get("git_dirty") == "true" else ""
    about = {
        "Run": opened.run,
        "Started": f"{datetime.fromtimestamp(opened.time):%Y-%m-%d %H:%M}",
        "Command": opened.command,
        "MLflow": f"experiment {opened.tracking_experiment} in {uri}{f', {link}' if link else ''}",
        "Code": f"commit {commit}{is_dirty}" if commit else "",
        "Python": first.removeprefix("# "),
        "Packages": ", ".join(f"{name} {installed[name]}" for name in _PACKAGES if name in installed),
        "Experiment": experiment,
    }
    return {name: text for name, text in about.items() if text}

"""The path shared by run, benchmark and sweep; what they plan and report is in their own files."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pipeline import registry
from pipeline.commands import page
from pipeline.commands.ending import find_places, print_end
from pipeline.commands.interruption import continuable
from pipeline.drive.checkpoints import find_initial
from pipeline.drive.directions import directions
from pipeline.drive.execute import execute
from pipeline.drive.recorded_run import Membership, artifact, recorded
from pipeline.errors import ExperimentError, PipelineError
from pipeline.experiment.load import ExperimentFile
from pipeline.launch.base import Launcher, Session
from pipeline.plan.plan import Plan
from pipeline.protocol.events import AnyEvent, Finished, Metrics, Point, Tagged, TrialOpened
from pipeline.protocol.trial import Trial, Weights
from pipeline.protocol.trial_outcome import Outcome
from pipeline.protocol.trial_result import TrialResult
from pipeline.record import provenance
from pipeline.record.folder import id_of
from pipeline.record.journal import FILE_NAME, read
from pipeline.record.recorder import Recorder
from pipeline.record.screen import Printable, Terminal, print_screen, write
from pipeline.report.advice import advise
from pipeline.report.numbers.goodput import Goodput, WallClock
from pipeline.report.numbers.row import Row
from pipeline.report.report import Report
from pipeline.report.report_files import AnyReport
from pipeline.report.text.claims import classify_speedup
from pipeline.report.text.tables import speedup
from pipeline.results import mlflow_names, record
from pipeline.results.page import FILE_NAME as PAGE_NAME
from pipeline.results.page import render
from pipeline.results.record import Result
from pipeline.results.terminal import format_full, format_screen
from pipeline.system import stages

_log = logging.getLogger(__name__)


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
    terminal: Terminal
    """Console for progress, warnings and the report."""
    verbose: bool
    """True if the workers' output is passed through to the terminal."""
    _initial: Weights | None
    _results: _Results
    _clock: WallClock
    _shown: list[Result | Printable]

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
        stages.begin("preparing the workers")
        with kind(session) as launcher:
            yield partial(execute, launcher=launcher, recorder=self.recorder, file=self.file, initial=self._initial)

    def execute(self, trials: Iterable[Trial]) -> list[Outcome]:
        """Run trials to their end, one after another."""
        with self.launching() as execute_trial:
            return [execute_trial(trial) for trial in trials]

    def warn(self, message: str) -> None:
        """Print a warning."""
        self.terminal.warnings.print(message, style="yellow", markup=False, highlight=False)

    def log(self, figures: Mapping[str, float | None], *, trial: str = "main", step: int, epoch: int) -> None:
        """Record the figures that are known as metrics of a trial."""
        if points := tuple(Point(name, step, value) for name, value in figures.items() if value is not None):
            self.recorder.receive(Metrics(trial=trial, step=step, epoch=epoch, points=points))

    def tag(self, row: Row, *, baseline: Row, trial: str = "main") -> None:
        """Tag a trial with its speedup and the interval of it, for the table of runs in the tracking store."""
        if row.ratio is None:
            return
        doubts = {"invalid": "not valid, ", "inconclusive": "inconclusive, "}
        tags = {"speedup": f"{doubts.get(classify_speedup(row, baseline), '')}{speedup(row)}"}
        self.recorder.receive(Tagged(run=id_of(self.folder), trial=trial, tags=tags))

    def finish(self, result: Result, *, draws: bool = True) -> None:
        """Save and record the result that the command ends in, to be shown once the run is closed.

        Args:
            result: the result, without ``run`` and ``places``.
            draws: True to write its page.
        """
        self.recorder.summary = mlflow_names.describe(result)
        if draws:
            with self.unharmed(f"{self.folder / PAGE_NAME}"):
                (self.folder / PAGE_NAME).write_text(render(result, about={}), encoding="utf-8")
                artifact(PAGE_NAME, self.recorder)
        result = result.model_copy(update={"run": id_of(self.folder), "places": _place(self.folder)})
        self._shown.append(result)
        record.save(result, self.folder)
        artifact(record.FILE_NAME, self.recorder)

    def show(self, report: Printable, *, summary: str = "") -> None:
        """Print a report once its results are where they belong.

        ``summary``, in Markdown, describes the run in the tracking store.
        """
        self.recorder.summary = summary
        self._shown.append(report)

    def save(self, files: Mapping[str, str]) -> None:
        """Write texts by file name into the run's folder, as artifacts. Call it last: the disk may be full."""
        for name, text in files.items():
            (self.folder / name).write_text(text, encoding="utf-8")
            artifact(name, self.recorder)

    def save_report(self, report: AnyReport) -> None:
        """Write the files of a report into the run's folder, as artifacts."""
        stages.begin("drawing the report")
        for name in page.save(report, self.folder, warn=self.warn):
            artifact(name, self.recorder)

    def advised(self, report: Report) -> Report:
        """Return the report with advice."""
        resources = self.plan.resources
        advice = advise(report, experiment=self.plan.experiment, cores=resources.cpus // resources.nodes)
        return report.model_copy(update={"advice": advice})

    @contextmanager
    def unharmed(self, what: str) -> Iterator[None]:
        """Turn an unexpected error inside into a warning: the measurements are in the journal.

        Raises:
            PipelineError: meant for the user.
            OSError: nothing can be written.
        """
        try:
            yield
        except (PipelineError, OSError):
            raise
        except Exception as error:  # noqa: BLE001 - a mistake of ours that must not cost a training
            _log.warning("%s failed", what, exc_info=error)
            self.warn(f"{what} could not be made: {type(error).__name__}: {error}; what was measured is kept")


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
        terminal.warnings.print(f"note: {note}", markup=False, highlight=False)
    initial = _initial(plan, resumes=folder is not None)
    shown: list[Result | Printable] = []
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
            clock = WallClock(plan.main.name, read(recorder.folder / FILE_NAME))
            with (
                recorder.subscribed(results),
                recorder.subscribed(clock),
                continuable(again, plan, file=file, folder=recorder.folder),
            ):
                yield Invocation(file, plan, recorder, terminal, verbose, initial, results, clock, shown)
    finally:
        for ended in folders:
            last = shown[-1] if shown else None
            if isinstance(last, Result):
                last = last.model_copy(update={"places": _place(ended)})  # once MLflow has answered
                with suppress(OSError):  # the disk is full: the error says so
                    record.save(last, ended)
                print_result(last, terminal=terminal, is_verbose=verbose)
                if show is not None:
                    show(last, ended)
            else:
                print_end(last, ended, terminal=terminal, is_verbose=verbose)


def _initial(plan: Plan, *, resumes: bool) -> Weights | None:
    """Find the weights that the trials start from; a run that resumes may go without, see `preparation.planning`."""
    try:
        return find_initial(plan.experiment)
    except ExperimentError:
        if not resumes:
            raise
        return None


def print_result(result: Result, *, terminal: Terminal, is_verbose: bool = False) -> None:
    """Print what a command ends with; with ``--quiet`` the answer alone, with ``--verbose`` all of it first."""
    if terminal.progress.quiet:
        write(terminal.result, result.verdict, style="bold")
        return
    full = (*format_full(result), "") if is_verbose else ()
    print_screen([*full, *format_screen(result)], stdout=terminal.result)


def _place(folder: Path) -> tuple[tuple[str, str], ...]:
    """Return where a run's results are, as `Result.places` has them."""
    found = find_places(folder)
    more = f"pipeline show {found.run} --full{f'    MLflow: {found.mlflow}' if found.mlflow else ''}"
    return (("Report", found.page) if found.page else ("Folder", str(folder))), ("More", more)

"""A recorded run: its folder, its journal and its subscribers, from the first event to the last."""

import io
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import rich.console

from pipeline.config.summary import flatten
from pipeline.config.uris import without_credentials
from pipeline.errors import PipelineError
from pipeline.planning.plan import Plan
from pipeline.protocol.events import ArtifactSaved, RunClosed, RunOpened, TrialOpened
from pipeline.protocol.trial import Status, Trial
from pipeline.recording import provenance
from pipeline.recording.console import Console
from pipeline.recording.ending import flush
from pipeline.recording.folder import create, describe, explained, id_of, shown, sweep_of
from pipeline.recording.mlflow import MlflowSubscriber
from pipeline.recording.recorder import Recorder
from pipeline.recording.store import check_store, resolve_uri
from pipeline.recording.terminal import Terminal
from pipeline.recording.trackers import attach

LOG_NAME = "log.txt"


@dataclass(frozen=True)
class Membership:
    """A run that is a trial of a sweep."""

    folder: Path
    """Its own, inside the sweep's; it is made by the sweep."""
    title: str
    """What sets it apart from the others."""
    interruption: Callable[[], str]
    """Why it was interrupted, if it was."""
    logs_model: bool
    """Whether it sends its model to the tracking store itself."""


class Log(io.TextIOBase):
    """The run's log, for consoles and log handlers of any thread. What can't be written is dropped.

    A full disk stops the run by its journal; nothing else may fail by it.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def write(self, text: str) -> int:
        """Append a text."""
        with suppress(OSError, ValueError):  # ValueError: it is closed
            self._file.write(text.encode(errors="replace"))
        return len(text)

    def writable(self) -> bool:
        """True."""
        return True

    def close(self) -> None:
        """Close the file; what is written later is dropped."""
        self._file.close()
        super().close()


@contextmanager
def recorded(
    plan: Plan,
    *,
    terminal: Terminal,
    tracked: bool = True,
    folder: Path | None = None,
    member: Membership | None = None,
    source: str = "",
) -> Iterator[Recorder]:
    """A recorder for the events of a run. The run is closed with the status that the block ends in.

    Args:
        plan: what will run.
        terminal: where progress and warnings are shown, and at the end the places of the results.
        tracked: whether the run goes to the tracking store, too, or to its folder only.
        folder: that of a run which goes on: its journal is continued, its run in the tracking store is opened again.
            By default a new run begins.
        member: what a run in a sweep is told by.
        source: the experiment file, by which a run that is to go on is known again.

    Raises:
        ResourceError: the run's folder or the tracking store can't be written, now or later.
        UsageError: the run that is to go on hasn't ended.
    """
    uri = resolve_uri(plan.experiment.tracking.uri, base=Path.cwd())
    warning = check_store(uri) if tracked else None
    folder = folder or (member.folder if member else create(plan))
    with explained(folder), closing(Log(folder / LOG_NAME)) as log, _logging_to(log):
        warn = _teller(terminal.warnings)
        if warning:
            warn(warning)
        consoles = [Console(each, trials=plan.trials) for each in (terminal, Terminal.on(_console(log)))]
        with closing(Recorder(folder, subscribers=consoles)) as recorder:
            files = describe(plan.experiment, folder)
            own = attach(plan.experiment, recorder, allowed=plan.main.allowed, warn=warn) if tracked else ()
            tracker = _tracker(recorder, uri=uri, warn=warn) if tracked else None
            if tracker:
                recorder.subscribe(tracker)
            status: Status = "FINISHED"
            message = ""
            try:
                _open(plan, recorder, uri=uri, files=files, member=member, source=source)
                with explained(folder):
                    yield recorder
            except BaseException as error:
                status, message = _status(error, interruption=member.interruption() if member else "")
                raise
            finally:
                for console in consoles:
                    console.close()
                try:
                    _close(recorder, status=status, message=message, warn=warn)
                finally:
                    for each in own:
                        each.close()
                    flush(tracker, recorder, terminal=terminal, uri=uri, warn=warn)


def _tracker(recorder: Recorder, *, uri: str, warn: Callable[[str], None]) -> MlflowSubscriber:
    return MlflowSubscriber(
        folder=recorder.folder, log=recorder.folder / LOG_NAME, warn=warn, uri=uri, known=recorder.known
    )


def open_trial(trial: Trial, recorder: Recorder) -> None:
    """Tell that a trial is about to be launched."""
    recorder.receive(
        TrialOpened(
            time=time.time(),
            trial=trial.name,
            role=trial.role,
            title=trial.title,
            repeat=trial.repeat,
            tags=provenance.trial_tags(trial),
            params=provenance.trial_params(trial),
            left_out=trial.left_out,
        )
    )


def artifact(name: str, recorder: Recorder) -> None:
    """Tell that a file of the run's folder belongs to the results."""
    recorder.receive(ArtifactSaved(time=time.time(), path=name))


def _teller(terminal: rich.console.Console) -> Callable[[str], None]:
    """Warnings stand out on the terminal, and are in the log, too."""

    def warn(message: str) -> None:
        wraps = terminal.is_interactive  # a log file gets its lines whole
        terminal.print(message, style="yellow", markup=False, highlight=False, soft_wrap=not wraps)
        logging.getLogger(__name__).warning(message)

    return warn


def _console(log: Log) -> rich.console.Console:
    """Plain lines, even where notebooks and FORCE_COLOR ask for more."""
    return rich.console.Console(
        file=cast("IO[str]", log), width=120, force_jupyter=False, force_terminal=False, color_system=None
    )


def _open(
    plan: Plan, recorder: Recorder, *, uri: str, files: Sequence[str], member: Membership | None, source: str
) -> None:
    experiment = plan.experiment
    recorder.receive(
        RunOpened(
            time=time.time(),
            run=id_of(recorder.folder),
            sweep=sweep_of(recorder.folder),
            title=member.title if member else "",
            logs_model=member is None or member.logs_model,
            file=source,
            tracking_uri=without_credentials(uri),
            tracking_experiment=experiment.tracking.experiment or experiment.name,
            tags=provenance.run_tags(plan),
            params=flatten(shown(experiment)),
            trials=tuple(dict.fromkeys(trial.name for trial in plan.trials)),
        )
    )
    for name in files:
        artifact(name, recorder)


def _close(recorder: Recorder, *, status: Status, message: str, warn: Callable[[str], None]) -> None:
    """Record the end of the run.

    Raises:
        OSError: the journal can't be written. If the run has failed, that is a warning: its failure is the error.
    """
    try:
        try:
            artifact(LOG_NAME, recorder)
        finally:
            recorder.receive(RunClosed(time=time.time(), status=status, message=message, summary=recorder.summary))
    except OSError as error:
        if status == "FINISHED":
            raise
        warn(f"the end of the run is not recorded in {error.filename}: {error.strerror}")


def _status(error: BaseException, *, interruption: str) -> tuple[Status, str]:
    if isinstance(error, KeyboardInterrupt):
        return "KILLED", interruption or "interrupted"
    return "FAILED", str(error) if isinstance(error, PipelineError) else f"{type(error).__name__}: {error}"


@contextmanager
def _logging_to(log: Log) -> Iterator[None]:
    """Warnings and messages of libraries go to the run's log, not to the terminal."""
    handler = logging.StreamHandler(log)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)

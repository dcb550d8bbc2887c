"""Life of a recorded run: its folder, journal, log and subscribers, from the first event to the last."""

import io
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import time as now
from typing import IO, cast

from pipeline.errors import PipelineError, ResourceError, raise_swallowed_interrupt
from pipeline.experiment.load import flatten
from pipeline.experiment.uris import without_credentials
from pipeline.experiment.values import Direction
from pipeline.plan.plan import Plan
from pipeline.protocol.events import LOSSES, ArtifactSaved, Finished, RunClosed, RunOpened, TrialOpened
from pipeline.protocol.trial import PARENTS, Status, Training, Trial
from pipeline.record import provenance
from pipeline.record.console import Console
from pipeline.record.folder import LOG_NAME, create, explain_os_errors, id_of, is_kept, killed, sweep_of
from pipeline.record.journal import FILE_NAME, ending, marked, read
from pipeline.record.recorder import Recorder
from pipeline.record.screen import OptionalConsole, Terminal, linked, write
from pipeline.system import begin_stage
from pipeline.tracking.follower import Follower, flush
from pipeline.tracking.loggers import own_names
from pipeline.tracking.store import check_store, resolve_uri


@dataclass(frozen=True)
class Membership:
    """Role of a run as a trial of a sweep."""

    folder: Path  # Folder of the trial inside the sweep's folder, created by the sweep
    title: str  # Title that distinguishes the trial, e.g. by its sampled values.
    interruption: Callable[[], str]  # Returns why the trial was interrupted; empty if unknown
    logs_model: bool  # True if the trial logs its model to the tracking store itself
    shares_cluster: bool
    """True if the trial's workers run on a cluster. What it lacks, other jobs may have: this is no failure."""


class Log(io.TextIOBase):
    """Text stream to the run's log, for any thread; drops what it can't write: the journal stops the run."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def write(self, text: str) -> int:
        """Append a text."""
        with suppress(OSError, ValueError):  # ValueError: the log is closed
            self._file.write(text.encode(errors="replace"))
        return len(text)

    def close(self) -> None:
        """Close the file; later writes are dropped."""
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
    directions: Mapping[str, Direction] | None = None,
    adds: bool = False,
) -> Iterator[Recorder]:
    """Open a run and yield its recorder; close the run with the status in which the block ends.

    A run is resumed if its ``folder`` is given. One that has ended may be added to (``adds``): it keeps its status and
    duration, and its description unless there is a new summary. ``--resume`` finds a run by its ``source``, a file.
    """
    raise_swallowed_interrupt()  # nothing has been made yet
    begin_stage("opening the run")
    tracking = plan.experiment.tracking
    uri = resolve_uri(tracking.uri, base=Path.cwd())
    warning = check_store(uri) if tracked else None
    folder = folder or (member.folder if member else create(plan))
    with explain_os_errors(folder), ExitStack() as stack:
        log = stack.enter_context(closing(Log(folder / LOG_NAME)))
        handler = logging.StreamHandler(log)  # what libraries log goes there instead of to the terminal
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.getLogger().addHandler(handler)
        stack.callback(logging.getLogger().removeHandler, handler)

        def warn(message: str) -> None:
            write(terminal.warnings, message, style="yellow")
            logging.getLogger(__name__).warning(message)

        if warning:
            warn(warning)
        # Plain lines for the log, even in notebooks and with FORCE_COLOR.
        plain = OptionalConsole(
            file=cast("IO[str]", log), width=120, force_jupyter=False, force_terminal=False, color_system=None
        )
        consoles = [Console(each, trials=plan.measured) for each in (terminal, Terminal.on(plain))]
        recorder = Recorder(folder, subscribers=consoles)
        stack.enter_context(closing(recorder))
        last = 0.0
        for event in read(folder / FILE_NAME) if recorder.is_resumed else ():
            last = event.time
            for console in consoles:
                console.run.update(event)
        end = (ending(folder / FILE_NAME) or killed(at=last)) if adds else None
        files = () if adds else provenance.describe(plan.experiment, folder)
        follower = None
        if tracked:
            follower = Follower(
                folder,
                uri=uri,
                warn=warn,
                opened=lambda address: terminal.progress.print(linked(address), soft_wrap=True),
                loggers=tracking.named_loggers,
                own=[*own_names(tracking.custom_loggers).values()],
            )
            recorder.subscribe(follower)
        stack.callback(flush, follower, recorder, console=terminal.progress, warn=warn)
        stack.enter_context(_closed_by_status(recorder, plan, end=end, member=member, warn=warn))
        for console in consoles:
            stack.callback(console.close)
        if not adds:
            recorder.receive(_describe(plan, folder, uri=uri, member=member, file=source, directions=directions or {}))
        for name in files:
            artifact(name, recorder)
        with explain_os_errors(folder):
            yield recorder


def is_complete(plan: Plan, folder: Path) -> bool:
    """Return True if each trial of a run or a benchmark has ended well since it was last launched."""
    ended = set[tuple[str, int]]()
    for event in marked(folder / FILE_NAME, "trial_opened", "finished"):
        if isinstance(event, TrialOpened):
            ended.discard((event.trial, event.repeat))
        elif isinstance(event, Finished):
            ended.add((event.trial, event.result.repeat))
    return plan.command not in PARENTS and ended >= {(trial.name, trial.repeat) for trial in plan.trials}


@contextmanager
def _closed_by_status(
    recorder: Recorder,
    plan: Plan,
    *,
    end: RunClosed | None,
    member: Membership | None,
    warn: Callable[[str], None],
) -> Iterator[None]:
    """Record the end of the run: ``end`` once more, perhaps with a new summary, or else how the block ends."""
    status: Status = "FINISHED"
    message = ""
    try:
        yield
    except BaseException as error:
        status, message = _status(error, member=member)
        if status == "KILLED" and is_complete(plan, recorder.folder):
            status, message = "FINISHED", ""  # its report was interrupted
        if status == "FAILED" and not is_kept(recorder.folder):
            error.add_note(
                f"The run ended before its first step. Its logs are in {recorder.folder}.\n"
                "pipeline list shows it only with --all."
            )
        raise
    finally:
        summary = recorder.summary
        own = RunClosed(status=status, message=message, summary=summary)
        if end is not None:
            own = end.model_copy(update={"summary": summary or end.summary})
        try:
            try:
                artifact(LOG_NAME, recorder)
                if (recorder.folder / LOSSES).exists():
                    artifact(LOSSES, recorder)
            finally:
                recorder.receive(own)
        except OSError as error:
            if status == "FINISHED":
                raise
            warn(f"the end of the run is not recorded in {error.filename}: {error.strerror}")


def open_trial(trial: Trial, recorder: Recorder, *, time: float | None = None) -> None:
    """Record the launch of a trial: that it is about to be launched, or was at ``time``."""
    recorder.receive(
        TrialOpened(
            time=now() if time is None else time,
            trial=trial.name,
            role=trial.role,
            title=trial.title,
            repeat=trial.repeat,
            tags=provenance.trial_tags(trial),
            params=provenance.trial_params(trial),
        )
    )


def artifact(name: str, recorder: Recorder) -> None:
    """Record that a file of the run's folder belongs to the results."""
    recorder.receive(ArtifactSaved(path=name))


def _describe(
    plan: Plan,
    folder: Path,
    *,
    uri: str,
    member: Membership | None,
    file: str = "",
    directions: Mapping[str, Direction] | None = None,
) -> RunOpened:
    experiment, is_quick = plan.experiment, isinstance(plan.main, Training) and plan.main.is_quick
    tracking = experiment.tracking
    return RunOpened(
        run=id_of(folder),
        sweep=sweep_of(folder),
        title=member.title if member else tracking.run_name or "",
        logs_model=(member is None or member.logs_model) and not is_quick,
        tracking_uri=without_credentials(uri),
        tracking_experiment=tracking.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or plan.experiment.name,
        tags=provenance.run_tags(plan),
        params=flatten(plan.experiment),
        trials=tuple(dict.fromkeys(trial.name for trial in plan.measured)),
        command=provenance.command(),
        launches=0 if plan.command in PARENTS else len(plan.trials),
        also=tracking.named_loggers,
        file=file,
        directions=directions or {},
    )


def _status(error: BaseException, *, member: Membership | None) -> tuple[Status, str]:
    if isinstance(error, KeyboardInterrupt):
        return "KILLED", (member.interruption() if member else "") or "interrupted"
    if isinstance(error, ResourceError) and member is not None and member.shares_cluster:
        return "KILLED", str(error)
    return "FAILED", str(error) if isinstance(error, PipelineError) else f"{type(error).__name__}: {error}"

"""A recorded run: its folder, its journal and its subscribers, from the first event to the last."""

import logging
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import rich.console

from pipeline.config.summary import flatten, to_yaml
from pipeline.contract import Status, Trial
from pipeline.errors import PipelineError, ResourceError
from pipeline.events import ArtifactSaved, RunClosed, RunOpened, TrialOpened
from pipeline.plan import Plan
from pipeline.recording import provenance
from pipeline.recording.console import Console
from pipeline.recording.mlflow import MlflowSubscriber, TrackingOutcome
from pipeline.recording.recorder import Recorder
from pipeline.recording.store import check_store, resolve_uri, run_link, without_credentials

LOG_NAME = "log.txt"
_DRAIN_SECONDS = 60.0


@contextmanager
def recorded(plan: Plan, *, terminal: rich.console.Console, tracked: bool = True) -> Iterator[Recorder]:
    """A recorder for the events of a run. The run is closed with the status that the block ends in.

    Args:
        plan: what will run.
        terminal: where progress is shown.
        tracked: whether the run goes to the tracking store, too, or to its folder only.

    Raises:
        ResourceError: the run's folder or the tracking store can't be written.
    """
    uri = resolve_uri(plan.experiment.tracking.uri, base=Path.cwd())
    warning = check_store(uri) if tracked else None
    folder = _create_folder(plan)

    def warn(message: str) -> None:
        terminal.print(message, style="yellow", markup=False, highlight=False)

    if warning:
        warn(warning)
    with (folder / LOG_NAME).open("w", encoding="utf-8") as log, _logging_to(folder / LOG_NAME):
        tracker = MlflowSubscriber(folder=folder, warn=warn) if tracked else None
        consoles = [
            Console(stdout=console, trials=plan.trials)
            for console in (terminal, rich.console.Console(file=log, width=120))
        ]
        recorder = Recorder(folder, subscribers=[*([tracker] if tracker else []), *consoles])
        status: Status = "FINISHED"
        message = ""
        try:
            _open(plan, recorder, uri=uri)
            yield recorder
        except BaseException as error:
            status, message = _status(error)
            raise
        finally:
            for console in consoles:
                console.close()
            _close(recorder, status=status, message=message)
            outcome = tracker.close(timeout_s=_DRAIN_SECONDS) if tracker else None
            terminal.print(_where_to_look(folder, uri, outcome), markup=False, highlight=False, soft_wrap=True)


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
            params={f"trial.{name}": value for name, value in provenance.trial_tags(trial).items()},
        )
    )


def artifact(name: str, recorder: Recorder) -> None:
    """Tell that a file of the run's folder belongs to the results."""
    recorder.receive(ArtifactSaved(time=time.time(), path=name))


def _create_folder(plan: Plan) -> Path:
    root = Path(plan.experiment.tracking.directory)
    command = "" if plan.command == "run" else f"{plan.command}-"
    name = f"{datetime.now():%Y%m%d-%H%M%S}-{plan.experiment.name}-{command}{secrets.token_hex(2)}"
    try:
        (root / name).mkdir(parents=True)
    except OSError as error:
        raise ResourceError(
            f"tracking.directory: {root} can't be written: {error.strerror}; name another folder"
        ) from error
    return root / name


def _open(plan: Plan, recorder: Recorder, *, uri: str) -> None:
    experiment = plan.experiment
    tracking = experiment.tracking.model_copy(update={"uri": without_credentials(experiment.tracking.uri)})
    shown = experiment.model_copy(update={"tracking": tracking})
    recorder.receive(
        RunOpened(
            time=time.time(),
            run=recorder.folder.name,
            tracking_uri=uri,
            tracking_experiment=experiment.tracking.experiment or experiment.name,
            tags=provenance.run_tags(plan),
            params=flatten(shown),
            trials=tuple(dict.fromkeys(trial.name for trial in plan.trials)),
        )
    )
    (recorder.folder / "experiment.yaml").write_text(to_yaml(shown), encoding="utf-8")
    provenance.write_environment(recorder.folder / "environment.txt")
    artifact("experiment.yaml", recorder)
    artifact("environment.txt", recorder)


def _close(recorder: Recorder, *, status: Status, message: str) -> None:
    artifact(LOG_NAME, recorder)
    recorder.receive(RunClosed(time=time.time(), status=status, message=message, summary=recorder.summary))
    recorder.close()


def _status(error: BaseException) -> tuple[Status, str]:
    if isinstance(error, KeyboardInterrupt):
        return "KILLED", "interrupted"
    return "FAILED", str(error) if isinstance(error, PipelineError) else f"{type(error).__name__}: {error}"


def _where_to_look(folder: Path, uri: str, outcome: TrackingOutcome | None) -> str:
    lines = [f"run      {folder}"]
    if (folder / "report.html").exists():
        lines.append(f"report   {folder / 'report.html'}")
    if outcome and outcome.run_id:
        lines.append(f"mlflow   {run_link(uri, outcome.experiment_id or '', outcome.run_id)}")
    if outcome and not outcome.delivered:
        lines.append(outcome.message)
    return "\n".join(lines)


@contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """Warnings and messages of libraries go to the run's log, not to the terminal."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()

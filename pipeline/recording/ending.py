"""End of a run: flushing results to the tracking store, and the links to them."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import rich.console

from pipeline.recording import journal
from pipeline.recording.mlflow import MlflowSubscriber
from pipeline.recording.outcome import TrackingOutcome
from pipeline.recording.recorder import Recorder
from pipeline.recording.store import run_link, runs_link, ui_address
from pipeline.recording.terminal import Terminal

_DRAIN_SECONDS = 60.0
_SILENT_SECONDS = 15.0  # of the drain, before a warning says what the run waits for
_LOOK_SECONDS = 0.25


def flush(
    tracker: MlflowSubscriber | None,
    recorder: Recorder,
    *,
    terminal: Terminal,
    uri: str,
    warn: Callable[[str], None],
) -> None:
    """Wait until the tracking store has all results, at most a minute or until Ctrl-C; print where they are."""
    try:
        if tracker and not _sent(tracker, _SILENT_SECONDS, console=terminal.progress):
            warn(
                f"waiting until MLflow has everything, {_DRAIN_SECONDS:.0f} seconds at most; Ctrl-C ends the wait, "
                f"pipeline sync {recorder.folder} sends the rest later"
            )
            _sent(tracker, _DRAIN_SECONDS - _SILENT_SECONDS, console=terminal.progress)
    finally:
        recorder.close()
        outcome = tracker.outcome if tracker else None
        if tracker:
            tracker.close()
        if outcome:
            with suppress(OSError):  # a full disk or a deleted folder: the journal has raised it
                outcome.keep(recorder.folder)
        places = where_to_look(recorder.folder, uri, outcome)
        terminal.result.print(places, markup=False, highlight=False, soft_wrap=True)


def where_to_look(folder: Path, uri: str, outcome: TrackingOutcome | None) -> str:
    """Return the places of a run's results, a line each.

    Args:
        folder: the run's folder.
        uri: URI of its tracking store.
        outcome: delivery of its results there; None if they weren't sent.
    """
    lines = [f"run      {folder}"]
    if (folder / "report.html").exists():
        lines.append(f"report   {folder / 'report.html'}")
    if outcome and outcome.run_id:
        lines.append(f"mlflow   {run_link(uri, outcome.experiment_id, outcome.run_id)}")
        lines.append(f"all runs {runs_link(ui_address(uri), outcome.experiment_id)}")
    if outcome and not outcome.delivered:
        lines.append(outcome.message)
    return "\n".join(lines)


def places_of(folder: Path) -> str:
    """Return the places of the results of a run that has ended; see `where_to_look`."""
    opened = journal.opened(folder / journal.FILE_NAME)
    own = opened.tracking_uri if opened else ""
    outcome = TrackingOutcome.kept(folder)
    return where_to_look(folder, outcome.uri if outcome and outcome.uri else own, outcome)


def _sent(tracker: MlflowSubscriber, timeout_s: float, *, console: rich.console.Console) -> bool:
    """Wait for the tracking store; return True if it has everything. A terminal shows what is missing meanwhile."""
    if not console.is_interactive or console.quiet:
        return tracker.finish(timeout_s) is not None
    deadline = time.monotonic() + timeout_s
    with console.status("sending to MLflow") as status:
        while tracker.finish(_LOOK_SECONDS) is None:
            status.update(f"sending to MLflow, {tracker.waiting} to go")
            if time.monotonic() > deadline:
                return False
    return True

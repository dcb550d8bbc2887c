"""The call of ``tracking.on_end`` once a run has ended. It can't harm the run: what goes wrong is a warning."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from pipeline.config import components, environment
from pipeline.config.uris import without_credentials_in
from pipeline.errors import ExperimentError
from pipeline.planning.plan import Plan
from pipeline.protocol.run_end import RunEnd
from pipeline.recording.journal import journal
from pipeline.recording.journal.folder import id_of
from pipeline.recording.mlflow.outcome import TrackingOutcome
from pipeline.recording.mlflow.store import run_page, ui_address
from pipeline.recording.terminal.console import Printable

KEY = "tracking.on_end"
_PATIENCE_S = 15.0


def call_on_end(plan: Plan, report: Printable | None, folder: Path, *, warn: Callable[[str], None]) -> None:
    """Call the function that the experiment names, if it names one; wait for it some seconds."""
    component = plan.experiment.tracking.on_end
    if component is None:
        return
    done = threading.Event()

    def call() -> None:
        try:
            function = components.bound(component, key=KEY, allowed=plan.main.allowed)
            function(_describe_end(report, folder, experiment=plan.experiment.name))
        except BaseException as error:  # noqa: BLE001 - the run has ended as it has, sys.exit() included
            raised = f"{component.target} raised {type(error).__name__}: {error}"
            said = str(error).removeprefix(f"{KEY}: ") if isinstance(error, ExperimentError) else raised
            warn(f"{KEY}: {without_credentials_in(environment.redact(said))}. The run is not affected.")
        finally:
            done.set()

    with _stdout_on_stderr():
        threading.Thread(target=call, name=KEY, daemon=True).start()
        if not done.wait(_PATIENCE_S):
            warn(
                f"{KEY}: {component.target} did not return within {_PATIENCE_S:g} s, so the command ends without it. "
                "The run is not affected."
            )


@contextmanager
def _stdout_on_stderr() -> Iterator[None]:
    """Send what this process and its children print to stderr: with --json, stdout is one document."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _describe_end(report: Printable | None, folder: Path, *, experiment: str) -> RunEnd:
    path, page = folder / journal.FILE_NAME, folder / "report.html"
    end, opened, outcome = journal.ending(path), journal.opened(path), TrackingOutcome.kept(folder)
    links = {"folder": str(folder.absolute())}
    if page.is_file():
        links["report"] = str(page.absolute())
    if opened is not None and outcome is not None and outcome.run_id:
        address = ui_address(outcome.uri or opened.tracking_uri)
        links["mlflow"] = run_page(address, outcome.experiment_id, outcome.run_id)
    status = end.status if end is not None else "KILLED"
    message = end.message if end is not None else ""
    failed = status != "FINISHED" and message
    return RunEnd(
        run=id_of(folder),
        experiment=experiment,
        status=status,
        result=message if failed or report is None else report.verdict,
        links=links,
    )

"""``pipeline sync``: send what MLflow lacks of a run."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from pipeline.commands.options import RUNS, Directory, RunArgument, say
from pipeline.errors import ResourceError, UsageError
from pipeline.experiment.uris import problem_of, without_credentials
from pipeline.record import runs
from pipeline.record.console import progress_on
from pipeline.record.screen import OptionalConsole
from pipeline.tracking.follow import sync_with_trials
from pipeline.tracking.store import resolve_uri


def sync(
    run: RunArgument,
    *,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="URI",
            show_default=False,
            help="Tracking server or database, e.g. sqlite:///mlflow.db. Default: the run's tracking.uri.",
        ),
    ] = "",
    directory: Directory = RUNS,
) -> None:
    """Send a run, or a sweep and its trials, to the tracking server, without duplicates."""
    folder = runs.find(run, directory)
    if to and (problem := problem_of(to)):
        raise UsageError(f"--to {without_credentials(to)}: {problem}")
    store = resolve_uri(to, base=Path.cwd()) if to else ""
    with progress_on(OptionalConsole(highlight=False, stderr=True)):
        for outcome in sync_with_trials(folder, warn=partial(say, err=True), to=store):
            say(outcome.message)
            if not outcome.delivered:
                raise typer.Exit(ResourceError.exit_code)

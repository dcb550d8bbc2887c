"""Commands that show and send the results of runs."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.arguments import IdsOnly, Json
from pipeline.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from pipeline.record.runs import RunSummary

RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="The run's id or a unique part of it, the run's folder, or latest.",
        show_default=False,
    ),
]


Directory = Annotated[
    Path, typer.Option("--directory", metavar="FOLDER", help="Folder with the runs (tracking.directory).")
]


def list_(
    *,
    directory: Directory = Path("runs"),
    every: Annotated[bool, typer.Option("--all", help="Also list runs that ended before their first step.")] = False,
    as_json: Json = False,
    quiet: IdsOnly = False,
) -> None:
    """List the runs in a folder, newest last."""
    from datetime import UTC, datetime

    import rich.console
    from pydantic import TypeAdapter

    from pipeline.commands.history.run_list import show_runs
    from pipeline.record import runs
    from pipeline.record.runs import RunSummary

    found = list(runs.summaries(directory, with_unstarted=every))
    if as_json:
        typer.echo(TypeAdapter(list[RunSummary]).dump_json(found, indent=2).decode())
    elif quiet:
        typer.echo("".join(f"{run.run}\n" for run in found), nl=False)
    elif found:
        show_runs(found, now=datetime.now(UTC), console=rich.console.Console(highlight=False))
    elif runs.folders(directory) and not every:
        typer.echo(f"{directory}: each run ended before its first step. List them with --all.", err=True)
    else:
        typer.echo(f"{directory} has no runs. Start one with pipeline run FILE.", err=True)


def show(
    run: RunArgument,
    *,
    directory: Directory = Path("runs"),
    full: Annotated[bool, typer.Option("--full", help="Print the full report: all tables, notes and links.")] = False,
    as_json: Json = False,
) -> None:
    """Show the result of a run, or how far a running run is."""
    import rich.console

    from pipeline.commands.ending import print_result
    from pipeline.commands.history.evaluations import evaluations, line
    from pipeline.commands.history.run_result import format_progress, result_of
    from pipeline.record.runs import data_of
    from pipeline.record.screen import headed, linked, print_report, print_screen, write
    from pipeline.results import record
    from pipeline.results.terminal import format_full, format_screen
    from pipeline.tracking.outcome import places_of

    console = rich.console.Console(highlight=False)
    summary = summary_of(run, directory)
    if (ended := record.read(summary.folder)) is not None:  # the result of a run; those of other commands are old
        lines = format_full(ended, width=console.width) if full else format_screen(ended)
        if as_json:
            typer.echo(ended.model_dump_json(indent=2))
        else:
            print_screen(lines, stdout=console)
        return
    result = result_of(summary)
    if as_json and result is None:
        raise UsageError(f"{summary.folder}: {_state(summary)}, so it has no result")
    if as_json and result is not None:
        typer.echo(result.to_json())
        return
    if summary.status == "RUNNING":
        write(console, f"{summary.run}: {format_progress(summary.folder)}", style="cyan")
    elif summary.status != "FINISHED":
        write(console, f"{summary.run}: {_state(summary)}", style="yellow")
    if result is not None and full:
        print_report(result.report, stdout=console)
    elif result is not None:
        print_result(result.report, summary.folder, stdout=console)
    if added := [line(event) for event in evaluations(summary.folder)]:
        console.print("", headed(["Evaluated later", *added], width=console.width), "", sep="\n")
    if full and (data := data_of(summary.folder)):
        console.print(", ".join(f"{name} {text}" for name, text in data.items()), markup=False, soft_wrap=True)
    if result is None or full:
        is_running = summary.status == "RUNNING"
        console.print(linked(places_of(summary.folder, is_running=is_running)), soft_wrap=True)


def ui(
    store: Annotated[
        str, typer.Option(envvar="MLFLOW_TRACKING_URI", metavar="URI", help="Tracking server or database to show.")
    ] = "sqlite:///mlflow.db",
    port: Annotated[int, typer.Option(min=1, max=65535, metavar="PORT", help="Port on localhost.")] = 5000,
) -> None:
    """Serve the MLflow UI with the results on localhost."""
    from pipeline.tracking.store import resolve_uri
    from pipeline.tracking.ui import serve

    serve(resolve_uri(store, base=Path.cwd()), port=port, ready=_open)


def sync(
    run: RunArgument,
    *,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="URI",
            help="Tracking server or database, e.g. sqlite:///mlflow.db. Default: the run's tracking.uri.",
        ),
    ] = None,
    directory: Directory = Path("runs"),
) -> None:
    """Send a run, or a sweep and its trials, to the tracking server, without duplicates."""
    import rich.console

    from pipeline.record import runs
    from pipeline.record.console import progress_on
    from pipeline.tracking.follow import sync_with_trials

    folder, store = runs.find(run, directory), _store(to) if to is not None else ""
    with progress_on(rich.console.Console(highlight=False, stderr=True)):
        for outcome in sync_with_trials(folder, warn=lambda message: typer.echo(message, err=True), to=store):
            typer.echo(outcome.message)
            if not outcome.delivered:
                raise typer.Exit(3)


def remove(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN]...", help="Ids of runs or unique parts of them, folders, or latest."),
    ] = None,
    *,
    failed: Annotated[
        bool, typer.Option("--failed", help="Remove runs that failed, also before their first step.")
    ] = False,
    keep_mlflow: Annotated[bool, typer.Option("--keep-mlflow", help="Keep the runs in MLflow.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
    directory: Directory = Path("runs"),
) -> None:
    """Remove runs: their folders, and their runs in MLflow, which can be restored there."""
    from pipeline.commands.history import removal

    if bool(names) == failed:
        raise UsageError("pipeline remove: name runs, or use --failed; not both")
    chosen = removal.choose_named(names, directory) if names else removal.choose_failed(directory)
    if not chosen:
        typer.echo(f"{directory}: no run matches, so nothing is removed")
        return
    typer.echo("".join(f"{folder.name}\n" for folder in chosen), nl=False)
    if keep_mlflow:
        typer.echo("MLflow keeps its runs.")
    elif not all(folder.is_symlink() for folder in chosen):
        typer.echo("Their runs in MLflow are deleted too. They can be restored there.")
    if not yes and not sys.stdin.isatty():
        raise UsageError("nothing is removed: the question can't be answered here. Use --yes.")
    try:
        if not yes and not typer.confirm("Remove?"):
            typer.echo("nothing is removed")
            return
    except typer.Abort:
        raise Interrupted("nothing is removed") from None
    for folder in removal.remove(chosen, keep_mlflow=keep_mlflow):
        typer.echo(f"removed {folder.name}")


def _store(to: str) -> str:
    from pipeline.experiment.uris import problem_of, without_credentials
    from pipeline.tracking.store import resolve_uri

    if problem := problem_of(to):
        raise UsageError(f"--to {without_credentials(to)}: {problem}")
    return resolve_uri(to, base=Path.cwd())


def _open(address: str) -> None:
    """Print a link to the runs of each experiment, since MLflow opens with its pages for GenAI."""
    from pipeline.tracking.ui import pages

    try:
        links = [f"{experiment}: {link}" for experiment, link in pages(address)]
    except (OSError, ValueError) as error:  # a server that asks for a password, or one that isn't MLflow
        links = [f"The experiments cannot be listed: {error}"]
    typer.echo("\n".join([f"MLflow UI: {address}", *links]))


def find_trained(run: str, directory: Path) -> Path:
    """Find a run whose model is used, see `pipeline.record.runs.find_trained`; print its note."""
    from pipeline.record import runs

    folder, note = runs.find_trained(run, directory)
    if note:
        typer.echo(f"note: {note}", err=True)
    return folder


def summary_of(run: str, directory: Path) -> "RunSummary":
    """Find a run and summarize it.

    Raises:
        UsageError: there is no such run, or it ended before its training started.
    """
    from pipeline.record import runs
    from pipeline.record.runs import summarized

    folder = runs.find(run, directory)
    if (summary := summarized(folder)) is None:
        raise UsageError(f"{folder}: this run ended before training started, so it has no result")
    return summary


def _state(run: "RunSummary") -> str:
    """Describe the state of a run that hasn't finished."""
    if run.status == "STOPPED":
        return f"it was {run.message}"
    became = {"FAILED": "failed", "RUNNING": "is running"}.get(run.status, f"was {run.status.lower()}")
    return f"it {became}" + (f": {run.message}" if run.message else "")

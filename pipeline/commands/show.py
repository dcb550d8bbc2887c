"""``pipeline show``: the result of a run as its command left it; of one without a result, what its journal says."""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from pipeline.commands.invocation import find_places
from pipeline.commands.options import RUNS, Directory, Json, RunArgument, print_json, say, summary_of
from pipeline.errors import UsageError
from pipeline.experiment.reported import iter_formatted
from pipeline.protocol.events import Evaluated
from pipeline.record import journal
from pipeline.record.folder import EXPERIMENT_NAME
from pipeline.record.runs import RunSummary, data_of
from pipeline.record.screen import OptionalConsole, print_screen, write
from pipeline.record.trial_progress import RunProgress
from pipeline.results import record
from pipeline.results.terminal import WIDTH, format_full, format_screen, wrap
from pipeline.tracking.store import places_of


def show(
    run: RunArgument,
    *,
    directory: Directory = RUNS,
    full: Annotated[bool, typer.Option("--full", help="Print the full report: all tables, notes and links.")] = False,
    as_json: Json = False,
) -> None:
    """Show the result of a run, or how far a running run is."""
    summary = summary_of(run, directory)
    folder, console = summary.folder, OptionalConsole(highlight=False)
    result, evaluations = record.read(folder), tuple(iter_evaluations(folder))
    is_running, state = summary.status == "RUNNING", describe_state(summary)
    if result is None and as_json:
        raise UsageError(f"{folder}: {state}{', so it has no result' * (summary.status != 'FINISHED')}")
    if result is not None:
        result = result.model_copy(update={"notes": (*evaluations, *result.notes), "places": find_places(folder)})
    if result is not None and as_json:
        print_json(result.model_dump_json(indent=1))
        return
    if is_running:
        write(console, f"{summary.run}: {format_progress(folder)}", style="cyan")
    elif summary.status != "FINISHED" or result is None:
        write(console, f"{summary.run}: {state}", style="yellow")
    if result is not None:
        print_screen(
            format_full(result, width=max(WIDTH, console.width)) if full else format_screen(result), stdout=console
        )
    else:
        print_screen([line for text in evaluations for line in wrap(text, rest="  ")], stdout=console)
    if full and (data := data_of(folder)):
        say(", ".join(f"{name} {text}" for name, text in data.items()))
    if result is None or full:
        say(places_of(folder, is_running=is_running))


def format_progress(folder: Path) -> str:
    """Return how far a running run is, by its journal."""
    run = RunProgress()
    for event in journal.Tail(folder / journal.FILE_NAME).new():
        run.update(event)
    progress = run.progress
    parts = ["running", *filter(None, [run.label])]
    if progress.started is not None:
        parts += [*progress.position(), *progress.training(), *progress.validation()]
    return ", ".join(parts)


def describe_state(run: RunSummary) -> str:
    """Describe the state of a run that hasn't finished, or has no result."""
    if run.status == "FINISHED":
        again = f"pipeline run {run.folder / EXPERIMENT_NAME} --resume {run.run}"
        return f"it has no {record.FILE_NAME}; to make it: {again}"
    if run.status == "STOPPED":
        return f"it was {run.message}"
    became = {"FAILED": "failed", "RUNNING": "is running"}.get(run.status, f"was {run.status.lower()}")
    return f"it {became}" + (f": {run.message}" if run.message else "")


def iter_evaluations(folder: Path) -> Iterator[str]:
    """Yield the evaluations that ``pipeline evaluate`` has added to a run, in order, a line each."""
    for event in journal.marked(folder / journal.FILE_NAME, "evaluated"):
        if isinstance(event, Evaluated):
            changed = f" ({'; '.join(event.changes)})" if event.changes else ""
            when = datetime.fromtimestamp(event.time).astimezone()
            yield f"Evaluated {when:%Y-%m-%d %H:%M}: {summarize(event)}{changed}"


def summarize(found: Evaluated) -> str:
    """Return an evaluation in a line: its values, and what was evaluated."""
    return f"{', '.join(iter_formatted(found.values))}: {found.subject}"

"""``pipeline list``: the runs of a folder, by their journals; the speedup of one that has ended, by its result."""

from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated

import typer
from pydantic import TypeAdapter
from rich.text import Text

from pipeline.commands.options import RUNS, Directory, Json, print_json, say
from pipeline.errors import UsageError
from pipeline.experiment.reported import PREFIX
from pipeline.record import runs
from pipeline.record.runs import RunSummary
from pipeline.record.screen import OptionalConsole
from pipeline.results import record
from pipeline.results.record import Fact, Table, format_fact
from pipeline.results.terminal import format_cell, format_table
from pipeline.wording import figure

_STYLES = {"RUNNING": "cyan", "FAILED": "red", "KILLED": "yellow"}
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))
_ANY_WIDTH = 10_000
_NONE = "-"
HEADER = ("run", "status", "metric", "speedup", "samples/s", "duration", "began", "what", "experiment")
"""Columns, the ones that a narrow terminal leaves out last."""


def list_runs(
    *,
    directory: Directory = RUNS,
    every: Annotated[bool, typer.Option("--all", help="Also list runs that ended before their first step.")] = False,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only ids.")] = False,
) -> None:
    """List the runs in a folder, newest last."""
    found = list(runs.summaries(directory, with_unstarted=every))
    if as_json:
        print_json(TypeAdapter(list[RunSummary]).dump_json(found, indent=2).decode())
    elif quiet and found:
        say("\n".join(run.run for run in found))
    elif found:
        console = OptionalConsole(highlight=False)
        console.print(
            format_runs(found, now=datetime.now(UTC), width=console.width if console.is_terminal else None),
            soft_wrap=True,
        )
    elif quiet:
        return
    elif runs.folders(directory):
        say(f"{directory}: each run ended before its first step{'' if every else '. List them with --all'}.", err=True)
    else:
        say(f"{directory} has no runs. Start one with pipeline run FILE.", err=True)


def format_runs(found: list[RunSummary], *, now: datetime, width: int | None) -> Text:
    """Return a table of runs; a terminal of a ``width`` gets no columns without values, and as many as it has room for.

    An id is never cut or broken, since it couldn't be copied.
    """
    rows = [tuple(_cells(run, now=now)) for run in found]
    columns = [
        index for index in range(len(HEADER)) if width is None or any(format_cell(row[index]) != _NONE for row in rows)
    ]
    table = Table(
        header=tuple(HEADER[index] for index in columns),
        rows=tuple(tuple(row[index] for index in columns) for row in rows),
    )
    header, *lines = format_table(table, width=width or _ANY_WIDTH)
    styled = (Text(line, style=_STYLES.get(run.status, "")) for run, line in zip(found, lines, strict=True))
    return Text("\n").join([Text(header), *styled])


def _cells(run: RunSummary, *, now: datetime) -> Iterator[Fact | str]:
    age = (now - run.began).total_seconds()
    seconds = age if run.status == "RUNNING" else run.seconds
    metric = run.metrics.get(run.metric)
    yield f"  {run.folder.name}" if run.sweep else run.run
    yield run.status
    yield _NONE if metric is None else f"{run.metric.removeprefix(PREFIX)} {figure(metric)}"
    yield _speedup(run)
    yield Fact(key="samples_per_second", value=run.samples_per_second, unit="samples/s")
    yield Fact(key="seconds", value=seconds, unit="s")
    yield format_age(age)
    yield run.what
    yield run.experiment


def _speedup(run: RunSummary) -> str:
    """Format the speedup as far as it is clear: of a wide interval only the ends."""
    ended = None
    with suppress(UsageError):  # a damaged result, as `show` says
        ended = record.read(run.folder)
    fact = ended.fact("speedup") if ended else None
    if fact is None or fact.value is None:
        return _NONE
    return "inconclusive" if fact.state == "inconclusive" else format_fact(fact, with_interval=fact.is_wide)


def format_age(seconds: float) -> str:
    """Format an age in seconds, e.g. "3 h ago"."""
    size, unit = next((pair for pair in _UNITS if seconds >= pair[0]), (1, "s"))
    return f"{max(0, int(seconds // size))} {unit} ago"

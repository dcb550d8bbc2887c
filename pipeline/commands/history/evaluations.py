"""Evaluations that ``pipeline evaluate`` has added to a run, as ``pipeline show`` prints them."""

from datetime import datetime
from pathlib import Path

from pipeline.protocol.events import Evaluated
from pipeline.record import journal
from pipeline.report.evaluated import sentence


def evaluations(folder: Path) -> list[Evaluated]:
    """Return the evaluations of a run's checkpoints in order."""
    found = journal.marked(folder / journal.FILE_NAME, "evaluated")
    return [event for event in found if isinstance(event, Evaluated)]


def line(event: Evaluated) -> str:
    """Return an evaluation in a line."""
    changed = f" ({'; '.join(event.changes)})" if event.changes else ""
    when = datetime.fromtimestamp(event.time).astimezone()
    return f"{when:%Y-%m-%d %H:%M} {sentence(event.values)}: {event.subject}{changed}"

"""Evaluations that ``pipeline evaluate`` has added to a run, as ``pipeline show`` prints them."""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from pipeline.protocol.events import Evaluated
from pipeline.recording import journal
from pipeline.report.evaluated import sentence


def evaluations(folder: Path) -> Iterator[str]:
    """Yield the evaluations of a run's checkpoints, each as a line."""
    for event in journal.marked(folder / journal.FILE_NAME, "evaluated"):
        if isinstance(event, Evaluated):
            changed = f" ({'; '.join(event.changes)})" if event.changes else ""
            when = datetime.fromtimestamp(event.time).astimezone()
            yield f"{when:%Y-%m-%d %H:%M} {sentence(event.values)}: {event.subject}{changed}"

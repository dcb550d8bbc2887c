"""Loggers that ``tracking.loggers`` names: one in each module, a class `Tracker` built from a run's folder.

Each writes a run that it receives again as a whole, which is what happens when a run is resumed or synced.
"""

import importlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pipeline.errors import Problem
from pipeline.experiment.targets import lacking
from pipeline.protocol.events import RunClosed
from pipeline.protocol.links import completed

NAMES = ("tensorboard", "wandb")
"""Trackers that there are, each named after the package that it needs."""


def build(name: str, folder: Path) -> Any:
    """Build a tracker, with the import of its package."""
    return _module(name).Tracker(folder)


def problems(loggers: Iterable[object]) -> Iterator[Problem]:
    """Find the trackers among the loggers whose package isn't installed."""
    for index, name in enumerate(loggers):
        if isinstance(name, str) and (needed := lacking("this logger", name)):
            yield Problem(f"tracking.loggers[{index}]", needed)


def places(folder: Path) -> Iterator[str]:
    """Yield where the trackers have put a run's results, a line for each tracker that has some."""
    for name in NAMES:
        yield from _module(name).places(folder)


def _module(name: str) -> Any:
    return importlib.import_module(f"{__package__}.{name}")


def description(end: RunClosed) -> str:
    """Return the end of a run in Markdown, without links to MLflow's pages."""
    return "\n\n".join(filter(None, (end.message, completed(end.summary, lambda _: None))))


def value_of(text: str) -> Any:
    """Return a parameter of a run as a number, truth value or list; other texts stay."""
    try:
        return json.loads(text)
    except ValueError:
        return text

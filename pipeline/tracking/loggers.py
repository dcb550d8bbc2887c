"""Loggers in addition to MLflow (``tracking.loggers``): those that are named, a module each, and the user's own.

All live in the process that writes to MLflow. Each has a thread that reads the journal, so it may be slow, and after an
exception it is left out, with a warning.
"""

import importlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from pipeline.errors import PipelineError, Problem
from pipeline.experiment.targets import lacking
from pipeline.experiment.uris import without_credentials_in
from pipeline.experiment.values import Component
from pipeline.protocol.events import AnyEvent, Evaluated, Finished, Metrics, Point, RunClosed, SystemMetrics
from pipeline.protocol.trial_result import MEASURED, OF_RANK, STARTUP
from pipeline.record import journal
from pipeline.record.folder import EXPERIMENT_NAME

NAMES = ("tensorboard", "wandb")
"""Loggers that there are, each named after the package that it needs: a class `Tracker` built from a run's folder."""
_LOOK_S = 0.25


class Tracker(Protocol):
    """Interface of a component of ``tracking.loggers``, which is built from the run's folder and its own arguments.

    All calls come from one thread of the process that writes to MLflow. In a resumed run (``--resume``) a new instance
    receives all events of the journal from the first; named ones also with ``pipeline sync``.
    """

    def receive(self, event: AnyEvent) -> None:
        """Receive an event that has been journaled; see `pipeline.protocol.events`."""

    def close(self) -> None:
        """End the tracker: the run has ended, finished or failed."""


class Logger(threading.Thread):
    """Thread that builds a tracker and feeds it the journal; ``tell`` gets its name and a warning, or "" at its end."""

    def __init__(
        self,
        name: str,
        build: Callable[[], Tracker],
        *,
        folder: Path,
        is_over: Callable[[], bool],
        end: Callable[[], RunClosed | None],
        tell: Callable[[str, str], None],
        remedy: str = "",
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.has_failed = False  # True if the tracker raised an exception
        self._build, self._is_over, self._end, self._tell, self._remedy = build, is_over, end, tell, remedy
        self._tail = journal.Tail(folder / journal.FILE_NAME)
        self.start()

    def run(self) -> None:
        """Feed the tracker; called by the thread."""
        try:
            tracker = self._build()
            for event in self._events():
                tracker.receive(event)
            tracker.close()
        except BaseException as error:  # noqa: BLE001 - nothing of tracking may reach training, sys.exit() included
            # Without its traceback: exceptions of services quote URIs with their passwords.
            self.has_failed = True
            text = without_credentials_in(" ".join(str(error).split()))[:300]
            if not isinstance(error, PipelineError):  # which names the key: it can't be built
                text = f"{self.name} raised {type(error).__name__}: {text}"
            self._tell(self.name, f"{text}. It gets no further events. {self._remedy}")
        finally:
            self._tell(self.name, "")

    def _events(self) -> Iterator[AnyEvent]:
        """Yield the events of the run; ends of earlier sessions are left out."""
        last = None
        while True:
            is_over = self._is_over()  # asked before the last look
            for event in self._tail.new():
                if isinstance(event, RunClosed):
                    last = event
                else:
                    yield event
            if is_over:
                if (end := self._end() or last) is not None:
                    yield end
                return
            time.sleep(_LOOK_S)


def start(
    names: Sequence[str],
    folder: Path,
    *,
    with_own: bool,
    tell: Callable[[str, str], None],
    is_over: Callable[[], bool],
    end: Callable[[], RunClosed | None],
) -> list[Logger]:
    """Start the loggers; ``tell`` gets a name and a warning, or an empty text when this logger has ended."""
    start_one = partial(Logger, folder=folder, is_over=is_over, end=end, tell=tell)
    remedy = f"Send the rest with: pipeline sync {folder}"
    loggers = [start_one(name, partial(build, name, folder), remedy=remedy) for name in names]
    if not with_own:
        return loggers
    from pipeline.experiment import components, references
    from pipeline.experiment.load import load
    from pipeline.experiment.targets import allowed_packages

    try:
        own = references.fill_in(load(folder / EXPERIMENT_NAME).experiment).tracking.custom_loggers
        allowed = allowed_packages()
    except Exception as error:  # noqa: BLE001 - the user's file, which the driver has read, or a variable that is gone
        tell("", f"tracking.loggers: the file can't be read again: {without_credentials_in(str(error))}")
        return loggers
    remedy = f"All events are in {folder / journal.FILE_NAME}"
    for key, name in own_names(own).items():
        build_own = partial(components.build, own[key], folder, key=key, allowed=allowed)
        loggers.append(start_one(name, build_own, remedy=remedy))
    return loggers


def own_names(own: Mapping[str, Component]) -> dict[str, str]:
    """Return the names of an experiment's own loggers in warnings, by key: their targets, if those differ."""
    targets = [component.target for component in own.values()]
    return {key: one.target if targets.count(one.target) == 1 else key for key, one in own.items()}


def build(name: str, folder: Path) -> Any:
    """Build a named logger, with the import of its package."""
    return importlib.import_module(f"pipeline.tracking.{name}").Tracker(folder)


def problems(loggers: Iterable[object]) -> Iterator[Problem]:
    """Find the named loggers whose package isn't installed."""
    for index, name in enumerate(loggers):
        if isinstance(name, str) and (needed := lacking("this logger", name)):
            yield Problem(f"tracking.loggers[{index}]", needed)


def places(folder: Path) -> Iterator[str]:
    """Yield where the named loggers have put a run's results, a line for each that has some."""
    for name in NAMES:
        yield from importlib.import_module(f"pipeline.tracking.{name}").places(folder)


def description(end: RunClosed) -> str:
    """Return the end of a run in Markdown, without links to MLflow's pages."""
    return "\n\n".join(filter(None, (end.message, end.summary)))


def value_of(text: str) -> Any:
    """Return a parameter of a run as a number, truth value or list; other texts stay."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def scalars(event: AnyEvent) -> Sequence[Point]:
    """Return the points of an event; none of repeated measurements, whose summary comes at the end."""
    match event:
        case Metrics() if not event.repeat:
            return event.points
        case SystemMetrics():
            return event.points
        case Evaluated():
            return [Point(name, event.step, value) for name, value in event.values.items()]
        case Finished() if not event.result.repeat:  # throughput and step time are the report's
            result = event.result
            values = {name: of(result) for name, of in MEASURED.items()} | {STARTUP: event.time_to_first_step_s}
            if len(result.peak_memory_mb) > 1:
                values |= {f"{OF_RANK}{rank}": peak for rank, peak in enumerate(result.peak_memory_mb)}
            return [Point(name, result.steps, value) for name, value in values.items() if value is not None]
    return ()

"""Loggers in addition to MLflow (``tracking.loggers``), which receive the same events.

Components run in the driver; loggers that are given by name run in the process that writes to MLflow. Their failures
don't reach training: each has a thread, so it may be slow, and after an exception it is left out, with a warning. The
journal has all events in any case.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from pipeline.experiment import components, references
from pipeline.experiment.schema import Experiment
from pipeline.experiment.uris import without_credentials_in
from pipeline.protocol.events import AnyEvent, RunClosed
from pipeline.record import journal
from pipeline.record.recorder import Recorder
from pipeline.tracking.trackers import named_trackers

_PATIENCE_S = 60.0


class Tracker(Protocol):
    """Interface of a component of ``tracking.loggers``, which is built from the run's folder and its own arguments.

    All calls come from one thread of the driver. In a resumed run (``--resume``) a new instance receives all events
    of the journal from the first.
    """

    def receive(self, event: AnyEvent) -> None:
        """Receive an event that has been journaled; see `pipeline.protocol.events`."""

    def close(self) -> None:
        """End the tracker: the run has ended, finished or failed."""


class Attached:
    """A tracker with the thread that feeds it the run's journal.

    Args:
        build: builds the tracker, in the thread.
        name: name in warnings.
        folder: the run's folder.
        warn: called from the thread when the tracker raises, and from `close` when it takes too long.
        remedy: what to do about missing results, for warnings.

    Raises:
        OSError: the journal can't be read.
    """

    def __init__(
        self,
        build: Callable[[], Tracker],
        *,
        name: str,
        folder: Path,
        warn: Callable[[str], None],
        remedy: str = "",
    ) -> None:
        self.name = name
        self.done = threading.Event()  # is_alive() is wrong once Ctrl-C has interrupted a join()
        """Set when the tracker has ended."""
        self.has_failed = False
        """True if the tracker raised an exception."""
        self._build, self._warn = build, warn
        self._journal = folder / journal.FILE_NAME
        self._remedy = remedy or f"All events are in {self._journal}"
        self._feed = journal.Feed(self._journal)
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def receive(self, event: AnyEvent) -> None:
        """Note the end of the run; the journal has all other events."""
        if isinstance(event, RunClosed):
            self.end(event)

    def end(self, event: RunClosed | None) -> None:
        """Declare the journal complete; the tracker receives ``event`` as the last one."""
        self._feed.end(event)

    def close(self, *, timeout_s: float = _PATIENCE_S) -> None:
        """Wait until the tracker has received all events, at most ``timeout_s`` seconds."""
        self._feed.end()
        if not self.done.wait(timeout_s):
            missing = f"Events that it lacks are in {self._journal}"
            self._warn(f"{self.name} did not end within {timeout_s:g} s of the run, which no longer waits. {missing}")

    def _work(self) -> None:
        try:
            tracker = self._build()
            while (event := self._feed.get()) is not None:
                tracker.receive(event)
            tracker.close()
        except BaseException as error:  # noqa: BLE001 - nothing of tracking may reach training, sys.exit() included
            # Without its traceback: exceptions of services quote URIs with their passwords.
            self.has_failed = True
            said = without_credentials_in(" ".join(str(error).split()))[:300]
            self._warn(f"{self.name} raised {type(error).__name__}: {said}. It gets no further events. {self._remedy}")
        finally:
            self.done.set()
            self._feed.close()


def attach(
    experiment: Experiment, recorder: Recorder, *, allowed: tuple[str, ...], warn: Callable[[str], None]
) -> Sequence[Attached]:
    """Build the trackers of an experiment and start feeding them.

    Raises:
        ExperimentError: a tracker can't be built.
    """
    built = [
        (components.build(component, recorder.folder, key=key, allowed=allowed), component.target)
        for key, component in references.fill_in(experiment).tracking.custom_loggers.items()
    ]

    def start(tracker: Tracker, name: str) -> Attached:
        return Attached(lambda: tracker, name=name, folder=recorder.folder, warn=warn)

    return [start(tracker, name) for tracker, name in built]


def attach_named(names: Sequence[str], folder: Path, *, warn: Callable[[str], None]) -> Sequence[Attached]:
    """Start feeding the trackers that ``tracking.loggers`` names.

    Raises:
        OSError: the journal can't be read.
    """
    remedy = f"Send the rest with: pipeline sync {folder}"
    return [
        Attached(partial(named_trackers.build, name, folder), name=name, folder=folder, warn=warn, remedy=remedy)
        for name in dict.fromkeys(names)
    ]

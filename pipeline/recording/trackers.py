"""Trackers of the user's own, which ``tracking.trackers`` names: each gets a run's events beside MLflow.

Nothing that happens in one reaches training: each has a thread, so it may be slow; one that raises is told of and left
out. The journal has all events in any case.
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from pipeline.config import components
from pipeline.config.schema import Experiment
from pipeline.events import Advanced, AnyEvent, Heartbeat
from pipeline.recording import journal
from pipeline.recording.backlog import Backlog

_PATIENCE_S = 60.0


class Tracker(Protocol):
    """What a component of ``tracking.trackers`` builds; it is called with the run's folder and its own arguments.

    All calls come from one thread of the driver. In a run that goes on (``--resume``) it is built anew and gets what
    happens from then on, a second `RunOpened` first.
    """

    def receive(self, event: AnyEvent) -> None:
        """Take note of an event that has just been journaled; see `pipeline.events`."""

    def close(self) -> None:
        """The run has ended, well or badly, and there are no more events."""


class Attached:
    """A tracker on a thread of its own.

    Args:
        tracker: the user's.
        name: for warnings.
        warn: told, from that thread, when the tracker raises; from `close`, when it takes too long to end.
        folder: the run's.
        is_journaled: whether the journal has all events so far. Only then memory needn't keep those that wait.
    """

    def __init__(
        self,
        tracker: Tracker,
        *,
        name: str,
        warn: Callable[[str], None],
        folder: Path,
        is_journaled: Callable[[], bool],
    ) -> None:
        self._tracker, self._name, self._warn = tracker, name, warn
        self._journal = folder / journal.FILE_NAME
        self._backlog = Backlog(self._journal, is_written=is_journaled)
        self._done = threading.Event()  # is_alive() is wrong once Ctrl-C has interrupted a join()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def receive(self, event: AnyEvent) -> None:
        """Take an event from any thread; returns at once and never raises."""
        if not (self._done.is_set() or isinstance(event, Advanced | Heartbeat)):
            self._backlog.put(event)

    def close(self, *, timeout_s: float = _PATIENCE_S) -> None:
        """Wait until the tracker has everything, so many seconds at most."""
        self._backlog.close()
        if not self._done.wait(timeout_s):
            missing = f"it lacks {len(self._backlog)} events or more; {self._journal} has them"
            self._warn(
                f"{self._name} has not ended {timeout_s:g} s after the run, which doesn't wait longer; {missing}"
            )

    def _work(self) -> None:
        try:
            while (event := self._backlog.get()) is not None:
                self._tracker.receive(event)
            self._tracker.close()
        except Exception as error:  # noqa: BLE001 - nothing that happens to tracking may reach training
            said = " ".join(str(error).split())[:300]
            rest = f"it gets no more events, {self._journal} has them all"
            self._warn(f"{self._name} raised {type(error).__name__}: {said}; {rest}")
        finally:
            self._done.set()


def attach(
    experiment: Experiment,
    folder: Path,
    *,
    allowed: tuple[str, ...],
    warn: Callable[[str], None],
    is_journaled: Callable[[], bool],
) -> Sequence[Attached]:
    """The trackers of an experiment, ready for events.

    Raises:
        ExperimentError: one can't be built.
    """
    built = [
        (components.build(component, folder, key=f"tracking.trackers[{n}]", allowed=allowed), component.target)
        for n, component in enumerate(experiment.tracking.trackers)
    ]
    return [
        Attached(tracker, name=name, warn=warn, folder=folder, is_journaled=is_journaled) for tracker, name in built
    ]

"""Trackers of the user's own, which ``tracking.trackers`` names: each gets a run's events beside MLflow.

Nothing that happens in one reaches training: each has a thread, so it may be slow; one that raises is told of and left
out. The journal has all events in any case.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from pipeline.config import components
from pipeline.config.schema import Experiment
from pipeline.protocol.events import AnyEvent
from pipeline.recording import journal
from pipeline.recording.feed import Feed
from pipeline.recording.recorder import Recorder
from pipeline.recording.store import redacted

_PATIENCE_S = 60.0


class Tracker(Protocol):
    """What a component of ``tracking.trackers`` builds; it is called with the run's folder and its own arguments.

    All calls come from one thread of the driver. In a run that goes on (``--resume``) it is built anew and gets all
    events from the first one on, as the journal has them.
    """

    def receive(self, event: AnyEvent) -> None:
        """Take note of an event that has just been journaled; see `pipeline.protocol.events`."""

    def close(self) -> None:
        """The run has ended, well or badly, and there are no more events."""


class Attached:
    """A tracker that follows a run's journal, on a thread of its own.

    Args:
        tracker: the user's.
        name: for warnings.
        recorder: the run's.
        warn: told, from that thread, when the tracker raises; from `close`, when it takes too long to end.

    Raises:
        OSError: the journal can't be read.
    """

    def __init__(self, tracker: Tracker, *, name: str, recorder: Recorder, warn: Callable[[str], None]) -> None:
        self._tracker, self._name, self._warn = tracker, name, warn
        self._journal = recorder.folder / journal.FILE_NAME
        self._feed = Feed(self._journal, known=recorder.known)
        self._done = threading.Event()  # is_alive() is wrong once Ctrl-C has interrupted a join()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def close(self, *, timeout_s: float = _PATIENCE_S) -> None:
        """Wait until the tracker has everything, so many seconds at most."""
        self._feed.end()
        if not self._done.wait(timeout_s):
            missing = f"what it lacks is in {self._journal}"
            self._warn(
                f"{self._name} has not ended {timeout_s:g} s after the run, which doesn't wait longer; {missing}"
            )

    def _work(self) -> None:
        try:
            while (event := self._feed.get()) is not None:
                self._tracker.receive(event)
            self._tracker.close()
        except Exception as error:  # noqa: BLE001 - nothing that happens to tracking may reach training
            # Without its traceback: exceptions of services quote addresses with their passwords.
            said = redacted(" ".join(str(error).split()))[:300]
            rest = f"it gets no more events, {self._journal} has them all"
            self._warn(f"{self._name} raised {type(error).__name__}: {said}; {rest}")
        finally:
            self._done.set()
            self._feed.close()


def attach(
    experiment: Experiment, recorder: Recorder, *, allowed: tuple[str, ...], warn: Callable[[str], None]
) -> Sequence[Attached]:
    """The trackers of an experiment, which follow its run.

    Raises:
        ExperimentError: one can't be built.
    """
    built = [
        (components.build(component, recorder.folder, key=f"tracking.trackers[{n}]", allowed=allowed), component.target)
        for n, component in enumerate(experiment.tracking.trackers)
    ]
    return [Attached(tracker, name=name, recorder=recorder, warn=warn) for tracker, name in built]

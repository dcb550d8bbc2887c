"""User-defined trackers, from ``tracking.trackers``: each receives the run's events, as MLflow does.

Their failures don't reach training: each tracker has a thread, so it may be slow; after an exception it is left out,
with a warning. The journal has all events in any case.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from pipeline.config import components
from pipeline.config.schema import Experiment
from pipeline.protocol.events import AnyEvent
from pipeline.recording import journal
from pipeline.recording.recorder import Recorder
from pipeline.recording.store import redacted

_PATIENCE_S = 60.0


class Tracker(Protocol):
    """Interface of a component of ``tracking.trackers``, which is built from the run's folder and its own arguments.

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
        tracker: the user's tracker.
        name: name in warnings.
        recorder: recorder of the run.
        warn: called from the thread when the tracker raises, and from `close` when it takes too long.

    Raises:
        OSError: the journal can't be read.
    """

    def __init__(self, tracker: Tracker, *, name: str, recorder: Recorder, warn: Callable[[str], None]) -> None:
        self._tracker, self._name, self._warn = tracker, name, warn
        self._journal = recorder.folder / journal.FILE_NAME
        self._feed = journal.Feed(self._journal, known=recorder.known)
        self._done = threading.Event()  # is_alive() is wrong once Ctrl-C has interrupted a join()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def close(self, *, timeout_s: float = _PATIENCE_S) -> None:
        """Wait until the tracker has received all events, at most ``timeout_s`` seconds."""
        self._feed.end()
        if not self._done.wait(timeout_s):
            missing = f"what is missing there is in {self._journal}"
            self._warn(f"{self._name} has not ended {timeout_s:g} s after the run, which no longer waits; {missing}")

    def _work(self) -> None:
        try:
            while (event := self._feed.get()) is not None:
                self._tracker.receive(event)
            self._tracker.close()
        except Exception as error:  # noqa: BLE001 - nothing that happens to tracking may reach training
            # Without its traceback: exceptions of services quote URIs with their passwords.
            said = redacted(" ".join(str(error).split()))[:300]
            rest = f"it gets no further events, {self._journal} has them all"
            self._warn(f"{self._name} raised {type(error).__name__}: {said}; {rest}")
        finally:
            self._done.set()
            self._feed.close()


def attach(
    experiment: Experiment, recorder: Recorder, *, allowed: tuple[str, ...], warn: Callable[[str], None]
) -> Sequence[Attached]:
    """Build the trackers of an experiment and start feeding them.

    Raises:
        ExperimentError: a tracker can't be built.
    """
    built = [
        (components.build(component, recorder.folder, key=f"tracking.trackers[{n}]", allowed=allowed), component.target)
        for n, component in enumerate(experiment.tracking.trackers)
    ]
    return [Attached(tracker, name=name, recorder=recorder, warn=warn) for tracker, name in built]

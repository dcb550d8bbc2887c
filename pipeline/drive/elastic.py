"""Elastic training: as many workers as fit when it starts, and when it starts again.

Global batches, their order and the learning rate are functions of the step, and a checkpoint loads at any world size:
with another number of workers it is the same training. See docs/decisions/0024-training-in-one-module.md.
"""

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from pipeline.errors import ResourceError
from pipeline.launch.base import Launcher
from pipeline.protocol.events import (
    AnyEvent,
    CheckpointSaved,
    Finished,
    Metrics,
    Resumed,
    Started,
    Trained,
    TrialOpened,
)
from pipeline.protocol.trial import Trial
from pipeline.wording import counted

T = TypeVar("T", bound=Trial)

_SETTLED_S = 3.0
"""Seconds for which capacity must stay the same: cores of workers that have just ended become free one by one."""


def sized(trial: T, *, launcher: Launcher) -> T:
    """Return the trial with as many workers as fit; wait until the least number fits.

    Raises:
        ResourceError: it doesn't within ``parallel.start_timeout_s``, or too few nodes can have workers.
    """
    parallel = trial.experiment.parallel
    deadline = time.monotonic() + parallel.start_timeout_s
    room, since = -1, time.monotonic()
    while room < parallel.workers:
        if (now_room := launcher.capacity(trial)) != room:
            room, since = now_room, time.monotonic()
        if room >= parallel.least_workers and time.monotonic() - since >= _SETTLED_S:
            break
        if room < parallel.least_workers and time.monotonic() > deadline:
            raise ResourceError(
                f"parallel.workers: at least {counted(parallel.least_workers, 'worker')} with "
                f"{counted(trial.cpus_per_worker, 'core')} each are required, but there was room for {room} within "
                f"parallel.start_timeout_s ({parallel.start_timeout_s:g} s). Add nodes, or continue later with "
                "--resume."
            )
        time.sleep(0.2)
    return trial.model_copy(update={"workers": min(room, parallel.workers)})


class Pace:
    """Progress and speed of a trial over all its attempts; subscribes to the recorder."""

    def __init__(self) -> None:
        self.has_started = False
        """True once rank 0 of this attempt is about to take its first step."""
        self.idle_s: float | None = None
        """Seconds from the last new step of earlier attempts to the first of this attempt; None without both."""
        self.checkpoint = 0
        """Step of the latest checkpoint that was reported to this process."""
        self.trained: Trained | None = None
        """End of this attempt's training, once only its measurements are left."""
        self._has_reported = False
        self._reported_at: float | None = None

    def receive(self, event: AnyEvent) -> None:
        """Update from an event."""
        match event:
            case TrialOpened():
                self.has_started, self.idle_s, self.trained, self._has_reported = False, None, None, False
            case Started():
                self.has_started = True
            case Resumed() | CheckpointSaved():
                self.checkpoint = event.step
            case Metrics():
                at = time.monotonic()
                if not self._has_reported and self._reported_at is not None:
                    self.idle_s = at - self._reported_at
                self._has_reported, self._reported_at = True, at
            case Trained():
                self.trained = event


def as_ended(trial: Trial, finished: Iterable[Finished]) -> Trial:
    """Return the trial with its last number of workers, with which its throughput was measured."""
    ends = [end.result for end in finished if end.result.trial == trial.name]
    return trial.model_copy(update={"workers": len(ends[-1].parts.nodes)}) if ends and trial.is_elastic else trial


def course(events: Iterable[AnyEvent], *, trial: str) -> tuple[tuple[int, int], ...]:
    """Return the numbers of workers of a trial, each after the step, counted from 1, that it started at."""
    before: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for event in events:
        match event:
            case Started() if event.trial == trial:
                before, sizes = sizes, {1: len(event.devices)}
            case Resumed() if event.trial == trial:
                sizes = {step: size for step, size in before.items() if step <= event.step} | {event.step + 1: sizes[1]}
    changes: list[tuple[int, int]] = []
    for step, size in sorted(sizes.items()):
        if not changes or changes[-1][1] != size:
            changes.append((step, size))
    return tuple(changes)


def remark(sizes: tuple[tuple[int, int], ...]) -> Iterator[str]:
    """Yield a report's note on a changed number of workers, if it changed."""
    if len(sizes) > 1:
        parts = ", ".join(f"{workers} from step {step} on" for step, workers in sizes)
        yield f"The number of workers changed: {parts}. Throughput and speedup are for the last {sizes[-1][1]} workers."

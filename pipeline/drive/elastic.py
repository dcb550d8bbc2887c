"""Elastic training: as many workers as fit, resized whenever that changes, and moved before their node goes away.

Global batches, their order and the learning rate are functions of the step, and a checkpoint loads at any world size:
with another number of workers it is the same training. See docs/decisions/0024-training-in-one-module.md.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from threading import Event
from typing import Any, TypeVar

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
from pipeline.protocol.trial import Training, Trial
from pipeline.system.background import in_background
from pipeline.wording import counted

Departure = Any
T = TypeVar("T", bound=Trial)

_POLL_S = 3.0
_SETTLED_S = 3.0
"""Seconds for which capacity must stay the same: cores of workers that have just ended become free one by one."""


def sized(trial: T, *, launcher: Launcher) -> T:
    """Return the trial with as many workers as fit; wait until the least number fits.

    Raises:
        ResourceError: it doesn't within ``parallel.start_timeout_s``, or too few nodes can have workers.
    """
    launcher.check_nodes(trial)
    parallel = trial.experiment.parallel
    deadline = time.monotonic() + parallel.start_timeout_s
    room, since = -1, time.monotonic()
    while room < parallel.workers:
        if (now_room := launcher.capacity(trial)) != room:
            room, since = now_room, time.monotonic()
        if room < parallel.least_workers:
            launcher.request_nodes(trial, workers=parallel.least_workers)
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
        self.in_vain = False
        """True if resizing has brought no more workers."""
        self.nodes: frozenset[str] = frozenset()
        """Host names of the nodes of this attempt's workers, once it has started."""
        self.leaving = ""
        """Nodes that are about to go away, for which this attempt was asked to end; empty if there are none."""
        self.trained: Trained | None = None
        """End of this attempt's training, once only its measurements are left."""
        self._known: set[str] = set()  # ids of nodes that were about to go away: several may share a host name
        self._opened_at = 0.0
        self._total = 0
        self._reports: list[tuple[float, int]] = []
        self._reported_at: float | None = None

    def receive(self, event: AnyEvent) -> None:
        """Update from an event."""
        match event:
            case TrialOpened():
                self._opened_at, self._reports = time.monotonic(), []
                self.has_started, self.idle_s = False, None
                self.nodes, self.leaving, self.trained = frozenset(), "", None
            case Started():
                self.has_started, self._total = True, event.total_steps
                self.nodes = frozenset(device.split()[0] for device in event.devices)
            case Resumed() | CheckpointSaved():
                self.checkpoint = event.step
            case Metrics():
                self._report(event.step, at=time.monotonic())
            case Trained():
                self.trained = event

    def is_worth(self, gain: float) -> bool:
        """Return whether a restart takes less time than it saves; ``gain`` is the saved part of the rest."""
        if len(self._reports) < 2 or self.in_vain:
            return False
        (first_at, first), (last_at, last) = self._reports
        if last == first:
            return False
        left_s = (self._total - last) * (last_at - first_at) / (last - first)
        return left_s * gain > first_at - self._opened_at

    def concerned(self, departures: Mapping[str, "Departure"]) -> list["Departure"]:
        """Return those departures that this attempt or the driver has to react to; each only once."""
        new = {
            id_: departure
            for id_, departure in departures.items()
            if id_ not in self._known and (departure.has_driver or departure.node in self.nodes)
        }
        self._known |= new.keys()
        return [*new.values()]

    def _report(self, step: int, *, at: float) -> None:
        if not self._reports and self._reported_at is not None:
            self.idle_s = at - self._reported_at
        self._reports = [*self._reports[:1], (at, step)]
        self._reported_at = at


@contextmanager
def watching_nodes(trial: Trial, *, launcher: Launcher, pace: Pace, warn: Callable[[str], None]) -> Iterator[None]:
    """Watch the cluster while a trial runs; the running workers are asked to save and end when that is due.

    It is due when one of their nodes is about to go away, and when more workers fit twice in a row and a restart pays
    off. While no more fit, nodes are requested for them.
    """
    most = trial.experiment.parallel.workers
    may_grow = trial.is_elastic and trial.workers < most
    may_move = isinstance(trial, Training) and launcher.departures is not None

    def watch(done: Event) -> None:
        looks = 0
        while not done.wait(_POLL_S):
            if may_move and _has_to_move(trial, launcher=launcher, pace=pace, warn=warn):
                launcher.resize.ask()
                return
            if may_grow:
                more = min(most, launcher.capacity(trial))
                looks = looks + 1 if more > trial.workers else 0
                if looks > 1 and pace.is_worth(1 - trial.workers / more):
                    launcher.resize.ask()
                    return
                if not looks and pace.is_worth(1 - trial.workers / most):
                    launcher.request_nodes(trial, workers=most - trial.workers)

    with in_background(watch, name="nodes") if may_grow or may_move else nullcontext():
        yield


def _has_to_move(trial: Trial, *, launcher: Launcher, pace: Pace, warn: Callable[[str], None]) -> bool:
    """Return whether workers are on a node that is about to go away, and warn of it; the driver's node ends the run."""
    assert launcher.departures is not None
    if not (pace.has_started and (leaving := pace.concerned(launcher.departures()))):
        return False
    notice = ", ".join(map(str, leaving))
    if any(node.has_driver for node in leaving):
        warn(f"{notice}. This command runs on that node, so it saves a checkpoint and ends.")
        launcher.stop.ask()
        return False
    if not trial.saves:
        warn(f"{notice}. Training continues until then, because there is no checkpoint to resume from.")
        return False
    pace.leaving = ", ".join(node.label for node in leaving)
    warn(f"{notice}. Saving a checkpoint to continue on other nodes.")
    return True


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

"""Goodput: the share of a training's wall clock in steps that count, and where the rest went.

The account is made from the journal, attempts that were interrupted included, so it costs the training nothing. A
report tells when it was made and how long its steps took; what lies between the steps of two reports is named after
what was done there. Every second from the run's opening to the training's end gets exactly one name.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

from pipeline.experiment.reported import PREFIX
from pipeline.experiment.values import Recorded
from pipeline.protocol.events import (
    AnyEvent,
    CheckpointSaved,
    Failed,
    FirstStep,
    Metrics,
    Resumed,
    RunOpened,
    Started,
    SystemMetrics,
    Trained,
    TrialOpened,
)
from pipeline.protocol.trial import EVALUATION
from pipeline.results import texts
from pipeline.results.record import Fact, Table
from pipeline.wording import duration

Use = Literal["steps", "start", "input", "evaluation", "saving", "redone", "stopped"]
"""Use of a second: a step that counts; what precedes the first step; waiting for batches; evaluation; checkpoints and
the trained model; steps done again or lost, since training resumed from an earlier step; no attempt at all."""
USES: tuple[Use, ...] = get_args(Use)
LABELS: Mapping[Use, str] = {
    "steps": "training steps",
    "start": "startup",
    "input": "data loading",
    "evaluation": "evaluation",
    "saving": "checkpointing",
    "redone": "lost progress",
    "stopped": "downtime",
}
"""Uses in words."""
_STEP, _DATA_WAIT = "time/step_ms", "time/window_data_wait_ms"


class Goodput(Recorded):
    """Wall clock of a training, from the run's opening to the training's end, in seconds by use."""

    seconds: Mapping[Use, float]

    @property
    def total_s(self) -> float:
        """Seconds from the run's opening to the training's end."""
        return sum(self.seconds.values())

    @property
    def shares(self) -> dict[Use, float]:
        """Shares of the wall clock by use; they add up to 1."""
        return {use: self.seconds.get(use, 0.0) / self.total_s for use in USES}

    @property
    def facts(self) -> tuple[Fact, ...]:
        """Shares as facts: ``goodput``, and what Google's goodput library calls ``badput/``, by its cause."""
        keys = {use: f"badput/{label.replace(' ', '_')}" for use, label in LABELS.items()} | {"steps": "goodput"}
        names = {use: f"{label}, of the wall clock" for use, label in LABELS.items()}
        names["steps"] = "goodput: training steps"
        shares = self.shares.items()
        return tuple(Fact(key=keys[use], value=share, unit="%", label=names[use]) for use, share in shares)

    @property
    def table(self) -> Table:
        """Time and share of each use that took a whole percent, and of the steps."""
        spent = [(use, percent) for use, percent in self.percents.items() if percent or use == "steps"]
        rows = [(LABELS[use], duration(self.seconds.get(use, 0.0)), f"{percent}%") for use, percent in spent]
        return Table(
            title="Where the time went (goodput)",
            header=("use", "time", "share"),
            rows=tuple(rows),
            notes=(self.sentence,),
            is_folded=True,
        )

    @property
    def percents(self) -> dict[Use, int]:
        """Shares in whole percents, which add up to 100."""
        shares = self.shares
        percents = {use: int(100 * share) for use, share in shares.items()}
        by_remainder = sorted(shares, key=lambda use: percents[use] - 100 * shares[use])
        for use in by_remainder[: 100 - sum(percents.values())]:
            percents[use] += 1
        return percents

    @property
    def sentence(self) -> str:
        """Goodput and the rest by name, in whole percents that add up to 100."""
        percents = self.percents
        rest = ", ".join(f"{LABELS[use]} {percent}%" for use, percent in percents.items() if percent and use != "steps")
        return texts.GOODPUT.format(
            percent=percents["steps"],
            steps=duration(self.seconds.get("steps", 0.0)),
            total=duration(self.total_s),
            rest=f" ({rest})" if rest else "",
        )


class WallClock:
    """Account of one training's wall clock. A recorder's subscriber."""

    def __init__(self, trial: str, events: Iterable[AnyEvent] = ()) -> None:
        self._trial = trial
        self._seconds: dict[Use, float] = defaultdict(float)
        self._until: float | None = None  # the time up to which every second has a name; None: the clock doesn't run
        self._sign: float = 0.0  # of life of this attempt, the last
        self._first_step: float | None = None
        self._saved_at = 0.0  # after the last report; 0 if there is no checkpoint of it
        self._resumed = self._reached = 0
        self._has_reported = self._is_under_way = self._is_over = False
        self._ended: dict[Use, float] | None = None  # the account of a training that is over, until it has new steps
        for event in events:
            self.receive(event)

    @property
    def goodput(self) -> Goodput | None:
        """The account so far; None if no step was reported."""
        seconds = self._seconds if self._ended is None else self._ended
        return Goodput(seconds=dict(seconds)) if seconds.get("steps") else None

    def receive(self, event: AnyEvent) -> None:
        """Account for the time up to an event."""
        if self._is_over and isinstance(event, RunOpened):
            self._reopen(at=event.time)
        if self._is_over:
            return
        match event:
            case RunOpened():
                self._end_attempt(at=event.time)
                self._spend("stopped", until=event.time)
            case TrialOpened() if event.trial == self._trial:
                self._end_attempt(at=event.time)
                self._is_under_way, self._sign = True, event.time
            case TrialOpened() if event.trial == EVALUATION:
                pass  # of a checkpoint, while the training doesn't run
            case TrialOpened():  # a measurement before the training
                self._spend("start", until=event.time)
                self._until = None
            case _ if event.trial == self._trial and self._is_under_way:
                self._take(event)

    def _take(self, event: AnyEvent) -> None:
        """Account for the time up to an event of the attempt that is under way."""
        match event:
            case Trained():
                self._spend("saving" if self._has_reported else "start", until=event.time)
                self._is_over = True
                if self._ended is not None:
                    self._seconds = defaultdict(float, self._ended)
            case Metrics():
                self._report(event)
            case Resumed():
                self._resumed = event.step
            case FirstStep():
                self._first_step = event.time
            case CheckpointSaved() if event.step >= self._reached:
                self._saved_at = event.time
        if isinstance(event, Metrics | CheckpointSaved | FirstStep | Started | Resumed | SystemMetrics | Failed):
            self._sign = max(self._sign, event.time)

    def _report(self, event: Metrics) -> None:
        """Account for a window of steps, or for an evaluation."""
        if self._until is not None and event.time <= self._until:
            return  # a report of an earlier attempt, sent again
        values = {point.name: point.value for point in event.points}
        if any(name.startswith(PREFIX) for name in values):
            self._spend("evaluation", until=event.time)
        elif _STEP in values:
            self._spend_between(until=event.time - event.steps * values[_STEP] / 1000)
            waited_s = event.steps * values.get(_DATA_WAIT, 0.0) / 1000
            self._spend("input", until=min(event.time, (self._until or 0.0) + waited_s))
            self._spend("steps", until=event.time)
            self._has_reported, self._reached, self._ended = True, max(self._reached, event.step), None

    def _spend_between(self, *, until: float) -> None:
        """Account for the time before the steps of a window: a start, repeated steps, or a checkpoint."""
        if self._has_reported:
            self._spend("saving", until=until)
            return
        if self._resumed < self._reached and self._first_step is not None:
            self._spend("start", until=min(until, self._first_step))
            self._spend("redone", until=until)
        self._spend("start", until=until)

    def _reopen(self, *, at: float) -> None:
        """Run the clock again after the training's end, for the steps that continue it; without any, nothing is added.

        What lies between is no stop: the training was over.
        """
        self._ended = dict(self._seconds)
        self._is_over = self._is_under_way = False
        self._until = at

    def _end_attempt(self, *, at: float) -> None:
        """Account for the end of the attempt before, if there was one, and for the pause after it."""
        if self._is_under_way:
            if not self._has_reported:
                self._spend("start", until=self._sign)
            self._spend("saving", until=self._saved_at)  # asked to stop, it saves after its last report
            self._spend("redone", until=self._sign)
            self._spend("stopped", until=at)
        self._until = at if self._until is None else self._until
        self._is_under_way = self._has_reported = False
        self._first_step, self._resumed, self._saved_at = None, 0, 0.0

    def _spend(self, use: Use, *, until: float) -> None:
        """Name the seconds that have no name yet; none if the clock doesn't run or has passed that time."""
        if self._until is not None and until > self._until:
            self._seconds[use] += until - self._until
            self._until = until

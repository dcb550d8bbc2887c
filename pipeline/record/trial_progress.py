"""Progress of a command from its events, in the words that bars, plain lines and ``pipeline show`` share."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from pipeline.experiment.reported import OF_TRAINING, TRAIN, iter_formatted, iter_shown_names
from pipeline.experiment.values import Direction
from pipeline.protocol.events import (
    AnyEvent,
    FirstStep,
    Heartbeat,
    Metrics,
    Phase,
    Resumed,
    RunOpened,
    Started,
    Trained,
    TrialOpened,
)
from pipeline.protocol.trial import Evaluation, Training, Trial
from pipeline.wording import clock, counted, figure, listed

VALIDATION, TEST = "validation/", "test/"
LOSS, THROUGHPUT = "train/loss", "throughput/samples_per_second"
_DONE = frozenset((Phase.REPORTING, Phase.EVALUATING, Phase.SAVING, Phase.ENDED))
"""Phases of a rank that has finished its current step."""
_BESIDE_TRAINING: Mapping[Phase | None, str] = {
    Phase.BUILDING: "compiling",
    Phase.EVALUATING: "evaluating",
    Phase.SAVING: "saving",
}


class TrialProgress:
    """State of a running trial: steps, stage, pace and values."""

    def __init__(
        self, directions: Mapping[str, Direction] | None = None, best: dict[str, tuple[float, int]] | None = None
    ) -> None:
        self.started: Started | None = None  # Sizes of the trial; None until rank 0 has built it
        self.step = 0  # Optimizer steps done
        self.values: dict[str, float] = {}  # Latest value of each metric
        self._directions = directions or {}
        self._best = {} if best is None else best  # with the epoch, also of earlier attempts
        self._current = 0  # step under way, counted from 1
        self._phase: Phase | None = None
        self._has_stepped = self._has_trained = self._is_measured = False
        self._first = self._last = (0.0, 0)  # times of the first and the last report, with the steps done

    def update(self, event: AnyEvent) -> None:
        """Take an event of the trial."""
        match event:
            case Started():
                self.started = event
            case FirstStep():
                self._has_stepped, self._phase = True, None
            case Resumed():
                self.step = max(self.step, event.step)
            case Metrics() if self.started:
                self._phase = None
                self._advance(event.step, time=event.time)
                for name, _, value in event.points:
                    self.values[name] = value
                    direction, best = self._directions.get(name), self._best.get(name, (math.nan, 0))[0]
                    is_worse = value <= best if direction == "max" else value >= best
                    if direction and not is_worse and not math.isnan(value):
                        self._best[name] = value, event.epoch
            case Heartbeat() if event.rank.is_first:
                self._phase, self._current = event.phase, event.step
                self._advance(event.step if event.phase in _DONE else event.step - 1, time=event.time)
            case Trained():
                self._has_trained, self._is_measured = True, event.is_measured

    @property
    def is_over(self) -> bool:
        """True once all steps are done; evaluating, saving and measuring may follow."""
        return self._has_trained or (self.started is not None and self.step >= self.started.total_steps)

    @property
    def stage(self) -> str:
        """Activity other than training steps, e.g. "evaluating"; empty in a step, and before the first event."""
        if self.started is None:
            return "" if self._phase is None else "building model and data"
        if self._has_trained and self._is_measured:
            return "measuring"
        if self.is_over:
            return _BESIDE_TRAINING.get(self._phase, "finishing")
        if self._has_stepped or (self._current and self._phase is Phase.BUILDING):
            return _BESIDE_TRAINING.get(self._phase, "")
        return "in the first step" if self._current else "waiting for the first batch"

    @property
    def epoch(self) -> int:
        """Epoch of the step under way, counted from 1."""
        if self.started is None:
            return 1
        step = self.step if self.is_over else max(self.step, self._current)
        return max(1, min(self.started.epochs, -(-step // max(1, self.started.steps_per_epoch))))

    def left_s(self, now: float) -> float | None:
        """Return the remaining seconds at the average pace since the first report, pauses included; None if unknown."""
        (begin, first), (time, step) = self._first, self._last
        if self.started is None or self.is_over or step == first or time == begin:
            return None
        pace = (time - begin) / (step - first)
        left = (self.started.total_steps - step) * pace
        if self.started.limit_s is not None:
            left = min(left, self.started.limit_s - step * pace)
        return max(0.0, left - max(0.0, now - time))

    def position(self) -> list[str]:
        """Return step and epoch with their totals, e.g. "step 10/400" and "epoch 1/4"."""
        assert self.started is not None
        return [f"step {self.step}/{self.started.total_steps}", f"epoch {self.epoch}/{self.started.epochs}"]

    def training(self) -> Iterator[str]:
        """Return the loss, the throughput and a task's logs, e.g. "loss 0.31" and "1,310 samples/s"."""
        return figures({name: x for name, x in self.values.items() if not name.startswith((VALIDATION, TEST))})

    def validation(self) -> Iterator[str]:
        """Yield the latest validation metrics, the main one first, and the best values so far."""
        ranks = {name: rank for rank, name in enumerate(self._directions)}
        names = [name for name in self.values if name.startswith(VALIDATION)]
        names.sort(key=lambda name: (ranks.get(name, len(ranks)), name == f"{VALIDATION}loss"))
        for name, count in iter_shown_names(names):
            if count > 1:
                yield f"{name} ({count} values)"
                continue
            yield f"{name} {figure(self.values[name])}"
            best, epoch = self._best.get(name, (self.values[name], 0))
            if best != self.values[name]:
                yield f"best {figure(best)} (epoch {epoch})"

    def _advance(self, step: int, *, time: float) -> None:
        """Note how many steps are done; what a resumed training reports again says nothing of its pace."""
        self.step = max(self.step, step)
        if not self._has_stepped or step < 1 or self._has_trained:
            return
        if not self._first[1]:
            self._first = self._last = (time, step)
        elif step > self._last[1]:
            self._last = (time, step)


class RunProgress:
    """State of a command, updated by each event of all its sessions; ``trials``: all that are measured, if known."""

    def __init__(self, trials: Sequence[Trial] = ()) -> None:
        self.opened: RunOpened | None = None  # Last start of the command
        self.trial: TrialOpened | None = None  # Last launch of a trial
        self.progress = TrialProgress()  # State of this trial
        self._planned: Mapping[str, Trial] = {trial.name: trial for trial in trials}
        compared = chain.from_iterable(trial.compared_with for trial in trials if isinstance(trial, Training))
        self._compared = {trial.name for trial in compared}
        self._launched: list[tuple[str, int]] = []
        self._best = defaultdict[str, dict[str, tuple[float, int]]](dict)

    def update(self, event: AnyEvent) -> None:
        """Take an event of the command or of one of its trials."""
        match event:
            case RunOpened():
                self.opened = event
            case TrialOpened():
                self.trial = event
                if (key := (event.trial, event.repeat)) not in self._launched:
                    self._launched.append(key)
                directions = self.opened.directions if self.opened else {}
                self.progress = TrialProgress(directions, self._best[event.trial])
            case _ if self.trial is not None and event.trial == self.trial.trial:
                self.progress.update(event)

    @property
    def is_launched(self) -> bool:
        """False for a trial that a training is compared with: the training's rank 0 runs it."""
        return self.trial is not None and self.trial.trial not in self._compared

    @property
    def is_training(self) -> bool:
        """False for a baseline and for a configuration of a benchmark, of which a few steps are timed."""
        return self.trial is not None and self.trial.role not in ("baseline", "reference", "cell")

    @property
    def label(self) -> str:
        """Title of the trial with its role in a run, or with its number in a benchmark; a restart keeps the number."""
        if self.trial is None:
            return ""
        if self.opened is None or any(isinstance(trial, Training | Evaluation) for trial in self._planned.values()):
            return self.trial.title if self.trial.role == "main" else f"{self.trial.trial}: {self.trial.title}"
        number, total = self._launched.index((self.trial.trial, self.trial.repeat)) + 1, self.opened.launches
        return f"[{min(number, total)}/{total}] {self.trial.title}" if total > 1 else self.trial.title

    @property
    def waiting(self) -> str:
        """Description of what the trial waits for until its first event."""
        trial = self._planned.get(self.trial.trial) if self.trial else None
        if self.trial is None or trial is None or trial.launcher == "inprocess":
            return "starting ..."
        count = int(self.trial.tags.get("world_size", trial.workers))  # an elastic trial may have fewer than planned
        return f"starting {counted(count, 'worker')} with {trial.launcher} ..."


def figures(values: Mapping[str, float]) -> Iterator[str]:
    """Yield the loss, the throughput, validation and test metrics and a task's logs, e.g. "loss 0.31"."""
    if LOSS in values:
        yield f"loss {figure(values[LOSS])}"
    if THROUGHPUT in values:
        yield f"{figure(values[THROUGHPUT])} samples/s"
    yield from iter_formatted({name: value for name, value in values.items() if name.startswith((VALIDATION, TEST))})
    for name, value in values.items():
        if name.startswith(TRAIN) and name.removeprefix(TRAIN) not in OF_TRAINING:
            yield f"{name} {figure(value)}"


def facts(event: Started) -> list[str]:
    """Describe model size, data, steps and devices."""
    samples = f"{event.train_samples:,} training and {event.validation_samples:,} validation samples"
    if event.epoch_samples != event.train_samples:
        samples += f", {event.epoch_samples:,} in an epoch"
    devices = [f"{count} x ({name})" if count > 1 else name for name, count in Counter(event.devices).items()]
    frozen = f" of {event.parameters + event.frozen:,}" if event.frozen else ""
    steps, places = f"{event.total_steps:,} steps", f"on {listed(devices, most=2)}"
    return [f"{event.parameters:,}{frozen} parameters", samples, steps, places]


def left(seconds: float | None) -> list[str]:
    """Return the remaining time, e.g. "0:35 left"; nothing if it is unknown or no time is left."""
    return [f"{clock(seconds)} left"] if seconds is not None and round(seconds) > 0 else []


def fitted(parts: Iterable[str], *, width: int) -> str:
    """Join the parts with commas that fit the width, and the first one in any case; the last matter least."""
    text = ""
    for part in parts:
        longer = f"{text}, {part}" if text else part
        text = longer if not text or len(longer) <= width else text
    return text

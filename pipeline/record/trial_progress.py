"""Progress of a command from its events, in the words that bars, plain lines and ``pipeline show`` share."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from statistics import mean
from typing import NamedTuple

from pipeline.experiment.reported import OF_TRAINING, TRAIN, iter_formatted, iter_shown_names
from pipeline.experiment.values import Direction
from pipeline.protocol.events import (
    AnyEvent,
    Finished,
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


class Reported(NamedTuple):
    """A value of a metric, and the epoch that it is from, counted from 1."""

    value: float
    epoch: int


class TrialProgress:
    """State of a running trial: steps, stage, pace and values; ``earlier`` evaluations count for the best so far."""

    def __init__(
        self,
        *,
        directions: Mapping[str, Direction] | None = None,
        batch: int | None = None,
        earlier: Iterable[Metrics] = (),
    ) -> None:
        self.started: Started | None = None
        """Sizes of the trial; None until rank 0 has built it."""
        self.step = 0
        """Optimizer steps done."""
        self.values: dict[str, Reported] = {}
        """Latest value of each metric."""
        self._directions, self._batch = directions or {}, batch
        self._best: dict[str, Reported] = {}
        self._evaluations: Counter[str] = Counter()
        self._current = 0  # step under way, counted from 1
        self._phase: Phase | None = None
        self._has_stepped = self._has_trained = self._is_measured = False
        self._first = self._last = (0.0, 0)  # times of the first and the last report, with the steps done
        for event in earlier:
            self._judge(event)

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
                self.values |= {point.name: Reported(point.value, event.epoch) for point in event.points}
                self._judge(event)
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

    @property
    def samples_per_second(self) -> float | None:
        """Throughput of the latest window; before the first, that of the steps since the first; None if unknown."""
        if THROUGHPUT in self.values:
            return self.values[THROUGHPUT].value
        return self._batch / pace if self._batch and (pace := self._step_s) else None

    def left_s(self, now: float) -> float | None:
        """Return the remaining seconds at the average pace since the first report, pauses included; None if unknown."""
        pace = self._step_s
        if self.started is None or self.is_over or pace is None:
            return None
        time, step = self._last
        left = (self.started.total_steps - step) * pace
        if self.started.limit_s is not None:
            left = min(left, self.started.limit_s - step * pace)
        return max(0.0, left - max(0.0, now - time))

    def position(self) -> list[str]:
        """Return step and epoch with their totals, e.g. "step 10/400" and "epoch 1/4"."""
        assert self.started is not None
        return [f"step {self.step}/{self.started.total_steps}", f"epoch {self.epoch}/{self.started.epochs}"]

    def training(self) -> Iterator[str]:
        """Yield the loss and the throughput, e.g. "loss 0.31" and "1,310 samples/s"."""
        loss, throughput = self.values.get(LOSS), self.samples_per_second
        known = {LOSS: loss.value if loss else None, THROUGHPUT: throughput}
        yield from figures({name: value for name, value in known.items() if value is not None})

    def logs(self) -> Iterator[str]:
        """Yield the latest training values of a task's logs, e.g. "train/kl 0.02"."""
        yield from _logs({name: reported.value for name, reported in self.values.items()})

    def validation(self) -> Iterator[str]:
        """Yield the latest validation metrics, the main one first, with the best so far, and the epoch of old ones."""
        ranks = {name: rank for rank, name in enumerate(self._directions)}
        names = [name for name in self.values if name.startswith(VALIDATION)]
        names.sort(key=lambda name: (ranks.get(name, len(ranks)), name == f"{VALIDATION}loss"))
        for name, count in iter_shown_names(names):
            if count > 1:
                yield f"{name} ({count} values)"
                continue
            latest, best = self.values[name], self._best.get(name)
            is_best = best == latest and self._evaluations[name] > 1
            notes = [f"epoch {latest.epoch}"] * (latest.epoch < self.epoch) + ["best so far"] * is_best
            yield f"{name} {figure(latest.value)}" + (f" ({', '.join(notes)})" if notes else "")
            if best is not None and best != latest:
                yield f"best {figure(best.value)} (epoch {best.epoch})"

    def _judge(self, event: Metrics) -> None:
        """Count an evaluation, and keep the best values; of equal ones the first counts."""
        for name, _, value in event.points:
            if (direction := self._directions.get(name)) is None:
                continue
            self._evaluations[name] += 1
            best = self._best.get(name)
            if not math.isnan(value) and (
                best is None or (value > best.value if direction == "max" else value < best.value)
            ):
                self._best[name] = Reported(value, event.epoch)

    def _advance(self, step: int, *, time: float) -> None:
        """Note how many steps are done; what a resumed training reports again says nothing of its pace."""
        self.step = max(self.step, step)
        if not self._has_stepped or step < 1 or self._has_trained:
            return
        if not self._first[1]:
            self._first = self._last = (time, step)
        elif step > self._last[1]:
            self._last = (time, step)

    @property
    def _step_s(self) -> float | None:
        """Average seconds of a step since the first report, pauses included; None until there are two."""
        steps = self._last[1] - self._first[1]
        return (self._last[0] - self._first[0]) / steps or None if steps else None


class RunProgress:
    """State of a command, updated by each of its events; ``trials``: all that are measured, if they are known."""

    def __init__(self, trials: Sequence[Trial] = ()) -> None:
        self.opened: RunOpened | None = None
        """Last start of the command."""
        self.trial: TrialOpened | None = None
        """Last launch of a trial."""
        self.progress = TrialProgress()
        """State of this trial."""
        self._planned: Mapping[str, Trial] = {trial.name: trial for trial in trials}
        compared = chain.from_iterable(trial.compared_with for trial in trials if isinstance(trial, Training))
        self._compared = {trial.name for trial in compared}
        self._launches = [trial for trial in trials if trial.name not in self._compared]
        self._launched: list[tuple[str, int]] = []
        self._durations: defaultdict[str, list[float]] = defaultdict(list)
        self._evaluations: defaultdict[str, list[Metrics]] = defaultdict(list)

    def update(self, event: AnyEvent) -> None:
        """Take an event of the command or of one of its trials."""
        self.note_evaluation(event)
        match event:
            case RunOpened():
                self.opened = event
            case TrialOpened():
                self.trial = event
                if (key := (event.trial, event.repeat)) not in self._launched:
                    self._launched.append(key)
                self.progress = TrialProgress(
                    directions=self.opened.directions if self.opened else {},
                    batch=self._batch(event),
                    earlier=self._evaluations[event.trial],
                )
            case Finished():
                if self.trial is not None:
                    self._durations[self.trial.title].append(event.time - self.trial.time)
            case _ if self.trial is not None and event.trial == self.trial.trial:
                self.progress.update(event)

    def note_evaluation(self, event: AnyEvent) -> None:
        """Keep an event, also one of an earlier session, if it has validation metrics: they count for the best."""
        if isinstance(event, Metrics) and any(point.name.startswith(VALIDATION) for point in event.points):
            self._evaluations[event.trial].append(event)

    @property
    def is_launched(self) -> bool:
        """False for a trial that a training is compared with: the training's rank 0 runs it."""
        return self.trial is not None and self.trial.trial not in self._compared

    @property
    def place(self) -> tuple[int, int]:
        """Number of the trial, from 1, and of all launches, 0 if unknown; a trial keeps its number if it restarts."""
        key = (self.trial.trial, self.trial.repeat) if self.trial else None
        if self._launches:
            keys = [(trial.name, trial.repeat) for trial in self._launches]
            return (keys.index(key) + 1 if key in keys else 0), len(keys)
        total = self.opened.launches if self.opened else 0
        return (min(self._launched.index(key) + 1, total) if key else 0), total

    @property
    def label(self) -> str:
        """Title of the trial with its role in a run, or with its number in a benchmark if it was planned."""
        if self.trial is None:
            return ""
        if any(isinstance(trial, Training | Evaluation) for trial in self._planned.values()):
            return self.trial.title if self.trial.role == "main" else f"{self.trial.trial}: {self.trial.title}"
        number, total = self.place
        return f"[{number}/{total}] {self.trial.title}" if number else self.trial.title

    @property
    def waiting(self) -> str:
        """What the trial waits for until its first event."""
        trial = self._planned.get(self.trial.trial) if self.trial else None
        if self.trial is None or trial is None or trial.launcher == "inprocess":
            return "starting ..."
        count = int(self.trial.tags.get("world_size", trial.workers))  # an elastic trial may have fewer than planned
        return f"starting {counted(count, 'worker')} with {trial.launcher} ..."

    def outlook(self, left_s: float | None) -> list[str]:
        """Return the place among several trials, and the time of the rest, as far as equal ones have told it."""
        number, total = self.place
        shown = [f"trial {number} of {total}"] if total > 1 and number else []
        if left_s is None or not number or not self._launches:
            return shown
        running, later = self._launches[number - 1], self._launches[number:]
        if isinstance(running, Training) and running.compared_with:
            shown.append(f"then up to {clock(running.experiment.benchmark.limit_s)} to measure the speedup")
        elif later and all(trial.title in self._durations for trial in later):
            rest = sum(mean(self._durations[trial.title]) for trial in later)
            shown += [f"all trials: {each}" for each in left(left_s + rest)]
        return shown

    def _batch(self, event: TrialOpened) -> int | None:
        """Return the samples of a trial's global batch; None if unknown."""
        if trial := self._planned.get(event.trial):
            return trial.experiment.train.global_batch_size
        batch = self.opened.params.get("train.global_batch_size", "") if self.opened else ""
        return int(batch) if batch.isdecimal() else None


def figures(values: Mapping[str, float]) -> Iterator[str]:
    """Yield the loss, the throughput, validation and test metrics and a task's logs, e.g. "loss 0.31"."""
    if LOSS in values:
        yield f"loss {figure(values[LOSS])}"
    if THROUGHPUT in values:
        yield f"{figure(values[THROUGHPUT])} samples/s"
    yield from iter_formatted({name: value for name, value in values.items() if name.startswith((VALIDATION, TEST))})
    yield from _logs(values)


def _logs(values: Mapping[str, float]) -> Iterator[str]:
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

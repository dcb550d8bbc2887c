"""Progress of one trial from its events, in the words that displays, plain lines and ``pipeline show`` share."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from pipeline.experiment.reported import OF_TRAINING, TRAIN, named, shown_names
from pipeline.experiment.values import Direction
from pipeline.protocol.events import AnyEvent, FirstStep, Heartbeat, Metrics, Phase, Resumed, Started, Trained
from pipeline.wording import clock, figure

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


class _Mark(NamedTuple):
    """Steps done at a time, in seconds since the epoch."""

    time: float
    step: int


class TrialProgress:
    """State of a running trial: steps, stage, pace and values, as far as its events tell.

    Args:
        directions: directions in which validation metrics are better, by reported name, the main metric first.
        batch: samples of a global batch; None if unknown.
        earlier: evaluations of earlier attempts, for the best values so far.
    """

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
        self._marks: tuple[_Mark, ...] = ()  # the first, the last but one and the last
        for event in earlier:
            for point in event.points:
                self._judge(point.name, Reported(point.value, event.epoch))

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
                for point in event.points:
                    self.values[point.name] = reported = Reported(point.value, event.epoch)
                    self._judge(point.name, reported)
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
        """Return the remaining seconds at the average pace since the first report, pauses included; None if unknown.

        Args:
            now: time in seconds since the epoch. Since the last report at most as much is taken for done as between
                the last two.
        """
        pace = self._step_s
        if self.started is None or self.is_over or pace is None:
            return None
        last = self._marks[-1]
        since = max(0.0, min(now - last.time, self.interval_s))
        left = (self.started.total_steps - last.step) * pace
        if self.started.limit_s is not None:
            left = min(left, self.started.limit_s - last.step * pace)
        return max(0.0, left - since)

    @property
    def interval_s(self) -> float:
        """Seconds between the last two reports of new steps; 0 before the second."""
        return self._marks[-1].time - self._marks[-2].time if self._marks else 0.0

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
        for name, count in shown_names(self._validated()):
            if count > 1:
                yield f"{name} ({count} values)"
                continue
            latest, best = self.values[name], self._best.get(name)
            is_best = best == latest and self._evaluations[name] > 1
            notes = [f"epoch {latest.epoch}"] * (latest.epoch < self.epoch) + ["best so far"] * is_best
            yield f"{name} {figure(latest.value)}" + (f" ({', '.join(notes)})" if notes else "")
            if best is not None and best != latest:
                yield f"best {figure(best.value)} (epoch {best.epoch})"

    def _validated(self) -> list[str]:
        """Return the names of the validation metrics, the main one first: a known direction, else any but the loss."""
        names = [name for name in self.values if name.startswith(VALIDATION)]
        ranks = {name: rank for rank, name in enumerate(self._directions)}
        return sorted(names, key=lambda name: (ranks.get(name, len(ranks)), name == f"{VALIDATION}loss"))

    def _judge(self, name: str, value: Reported) -> None:
        """Count an evaluation, and keep the best value."""
        if (direction := self._directions.get(name)) is None:
            return
        self._evaluations[name] += 1
        better = max if direction == "max" else min
        known = [each for each in (self._best.get(name), value) if each and not math.isnan(each.value)]
        if known:  # of equal values the first counts
            self._best[name] = better(known, key=lambda each: each.value)

    def _advance(self, step: int, *, time: float) -> None:
        """Note how many steps are done; what a resumed training reports again says nothing of its pace."""
        self.step = max(self.step, step)
        if not self._has_stepped or step < 1 or self._has_trained:
            return
        mark = _Mark(time, step)
        if not self._marks:
            self._marks = (mark, mark)
        elif step > self._marks[-1].step:
            self._marks = (self._marks[0], self._marks[-1], mark)

    @property
    def _step_s(self) -> float | None:
        """Average seconds of a step since the first report, pauses included; None until there are two."""
        if not self._marks or self._marks[-1].step == self._marks[0].step:
            return None
        first, last = self._marks[0], self._marks[-1]
        return (last.time - first.time) / (last.step - first.step) or None


def figures(values: Mapping[str, float]) -> Iterator[str]:
    """Yield the loss, the throughput, validation and test metrics and a task's logs, e.g. "loss 0.31"."""
    if LOSS in values:
        yield f"loss {figure(values[LOSS])}"
    if THROUGHPUT in values:
        yield f"{figure(values[THROUGHPUT])} samples/s"
    yield from named({name: value for name, value in values.items() if name.startswith((VALIDATION, TEST))})
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
    shown = ", ".join(devices[:2]) + (f" and {len(devices) - 2} more" if len(devices) > 2 else "")
    frozen = f" of {event.parameters + event.frozen:,}" if event.frozen else ""
    parameters = f"{event.parameters:,}{frozen} parameters"
    return [parameters, samples, f"{event.total_steps:,} steps", f"on {shown}"]


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

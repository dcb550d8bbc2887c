"""Throughput in steady state: warm-up, evaluation and checkpoints excluded, the device synchronised."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from pipeline.training.compilation import Stopwatch
from pipeline.training.step import MicroBatches

Instant = float | torch.cuda.Event


@dataclass(frozen=True)
class Lap:
    """A timed stretch of training."""

    steps: int
    samples: int
    seconds: float
    data_wait_ms: float = 0.0
    """What a step waited for its batches on the rank that waited longest, in the mean over the steps."""
    own_wait_ms: float = 0.0
    """The same of this rank."""

    @property
    def samples_per_second(self) -> float:
        """Throughput over all workers."""
        return self.samples / self.seconds

    @property
    def step_ms(self) -> float:
        """Milliseconds of one optimizer step."""
        return 1000 * self.seconds / self.steps


@dataclass
class Clock:
    """Times training in laps: `lap` ends one stretch and begins the next, `resume` begins one anew."""

    device: torch.device
    warmup_steps: int
    compiling: Stopwatch | None = None
    laps: list[Lap] = field(default_factory=list)
    _steps: int = 0
    _since: float = 0.0
    _compiled_s: float = 0.0
    _cold: Lap | None = None

    def resume(self) -> None:
        """Start, or go on after a pause."""
        synchronize(self.device)
        self._compiled_s = self.compiling.seconds if self.compiling else 0.0
        self._since = time.perf_counter()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Leave what happens inside out of the lap."""
        synchronize(self.device)
        begin = time.perf_counter()
        yield
        self._since += time.perf_counter() - begin

    @property
    def has_compiled(self) -> bool:
        """Whether something was compiled since a lap was last counted, or since resume."""
        return self.compiling is not None and self.compiling.seconds > self._compiled_s

    def lap(self, *, steps: int, samples: int) -> Lap:
        """The stretch since the last lap or resume; the next one begins."""
        synchronize(self.device)
        now = time.perf_counter()
        lap = Lap(steps, samples, now - self._since)
        self._since = now
        return lap

    def count(self, lap: Lap, *, is_disturbed: bool = False) -> None:
        """Count a lap as steady if it began after the warm-up and wasn't disturbed, by a compiler on any rank."""
        if self._steps >= self.warmup_steps and not is_disturbed:
            self.laps.append(lap)
        elif not self.laps:
            self._cold = lap
        self._steps += lap.steps
        self._compiled_s = self.compiling.seconds if self.compiling else 0.0

    @property
    def steady(self) -> list[Lap]:
        """The laps that count: those at the end of an epoch may be too short to say anything.

        Training that ends within its warm-up has only a cold lap, which is better than nothing.
        """
        if not self.laps:
            return [self._cold] if self._cold else []
        longest = max(lap.steps for lap in self.laps)
        return [lap for lap in self.laps if lap.steps >= longest / 2]


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class DataWait:
    """Times what a stream of micro-batches takes to give the next one, step by step.

    On a GPU the host runs ahead of what is computed, so its own waiting may cost nothing. There the device's clock
    counts: from the end of all that was queued before a batch was asked for until the batch is there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[Instant, Instant]] = []
        self._steps: list[list[tuple[Instant, Instant]]] = []

    def timed(self, stream: MicroBatches) -> MicroBatches:
        """The same micro-batches."""
        while True:
            begin = self._now()
            if (pair := next(stream, None)) is None:
                return
            self._spans.append((begin, self._now()))
            yield pair

    def end_step(self) -> None:
        """Count all that was waited for since the last one as one step's."""
        self._steps.append(self._spans)
        self._spans = []

    def take(self) -> list[float]:
        """Milliseconds that each step since the last call has waited; the device must have come to the end of them."""
        steps, self._steps = self._steps, []
        return [sum(_milliseconds(begin, end) for begin, end in spans) for spans in steps]

    def _now(self) -> Instant:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


def _milliseconds(begin: Instant, end: Instant) -> float:
    if isinstance(begin, float) and isinstance(end, float):
        return 1000 * (end - begin)
    assert isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event)  # noqa: PT018 (one device's clock)
    return float(begin.elapsed_time(end))

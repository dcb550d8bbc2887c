"""Timing of a training: laps in steady state, without warm-up, evaluation and saving, and the wait for batches."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from pipeline.training.batches.rank_batches import MicroBatches
from pipeline.training.model.compilation import Stopwatch


@dataclass(frozen=True)
class Lap:
    """A timed interval of training steps."""

    steps: int
    samples: int
    seconds: float
    data_wait_ms: float = 0.0
    """Wait for batches in a step, in milliseconds: the longest of any rank, averaged over the steps."""
    own_wait_ms: float = 0.0
    """Wait for batches in a step on this rank, in milliseconds, averaged over the steps."""

    @property
    def samples_per_second(self) -> float:
        """Samples per second over all workers."""
        return self.samples / self.seconds

    @property
    def step_ms(self) -> float:
        """Mean duration of an optimizer step, in milliseconds."""
        return 1000 * self.seconds / self.steps


@dataclass
class Clock:
    """Stopwatch of a training, in laps; the device is synchronized at the end of each."""

    device: torch.device
    warmup_steps: int
    compiling: Stopwatch | None = None
    laps: list[Lap] = field(default_factory=list)
    _steps: int = 0
    _since: float = 0.0
    _compiled_s: float = 0.0
    _cold: Lap | None = None

    def resume(self) -> None:
        """Start a lap, at the beginning or after a pause."""
        synchronize(self.device)
        self._compiled_s = self.compiling.seconds if self.compiling else 0.0
        self._since = time.perf_counter()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Exclude the block from the lap."""
        synchronize(self.device)
        begin = time.perf_counter()
        yield
        self._since += time.perf_counter() - begin

    @property
    def has_compiled(self) -> bool:
        """True if something was compiled since the last `count` or `resume`."""
        return self.compiling is not None and self.compiling.seconds > self._compiled_s

    def lap(self, *, steps: int, samples: int) -> Lap:
        """End the lap and begin the next."""
        synchronize(self.device)
        now = time.perf_counter()
        lap = Lap(steps, samples, now - self._since)
        self._since = now
        return lap

    def count(self, lap: Lap, *, is_disturbed: bool = False) -> None:
        """Count a lap as steady if it began after the warm-up and no rank compiled anything (``is_disturbed``)."""
        if self._steps >= self.warmup_steps and not is_disturbed:
            self.laps.append(lap)
        elif not self.laps:
            self._cold = lap
        self._steps += lap.steps
        self._compiled_s = self.compiling.seconds if self.compiling else 0.0

    @property
    def steady(self) -> list[Lap]:
        """Laps that count, without the short ones at the end of an epoch.

        A training that ends within its warm-up has only a cold lap, which is used instead.
        """
        if not self.laps:
            return [self._cold] if self._cold else []
        longest = max(lap.steps for lap in self.laps)
        return [lap for lap in self.laps if lap.steps >= longest / 2]


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Instant:
    """A point in time on a device: a CUDA event in the current stream, or the host's clock on CPU."""

    def __init__(self, device: torch.device) -> None:
        self._time = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    def since(self, other: "Instant") -> float:
        """Return the milliseconds since another instant. Synchronize the device first."""
        if self._event is not None and other._event is not None:
            return float(other._event.elapsed_time(self._event))
        return 1e3 * (self._time - other._time)


class DataWait:
    """Time that steps wait for their batches, measured during training.

    On a GPU the host runs ahead of the device, so that a wait of the host may cost nothing. There the time is taken
    by CUDA events: from the end of the work queued before a batch was requested until the batch has arrived.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[Instant, Instant]] = []
        self._steps: list[list[tuple[Instant, Instant]]] = []

    def timed(self, stream: MicroBatches) -> MicroBatches:
        """Yield the same micro-batches, and record the wait for each."""
        while True:
            begin = Instant(self._device)
            if (pair := next(stream, None)) is None:
                return
            self._spans.append((begin, Instant(self._device)))
            yield pair

    def end_step(self) -> None:
        """Assign the waits since the last call to one step."""
        self._steps.append(self._spans)
        self._spans = []

    def take(self) -> list[float]:
        """Return the milliseconds that each step since the last call has waited. Synchronize the device first."""
        steps, self._steps = self._steps, []
        return [sum(end.since(begin) for begin, end in spans) for spans in steps]

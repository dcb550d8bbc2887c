"""Timing of a training: laps in steady state, without warm-up, evaluation and saving, and the wait for batches."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pipeline.train.order import MicroBatch
from pipeline.train.ranks import synchronize

if TYPE_CHECKING:
    from pipeline.train.compilation import Stopwatch

Stream = Iterator[tuple[MicroBatch, Any]]


@dataclass(frozen=True)
class Lap:
    """A timed interval of training steps, with the samples of all workers."""

    steps: int
    samples: int
    seconds: float
    data_wait_ms: float = 0.0
    """Wait for batches in a step: the longest of any rank, averaged over the steps."""
    own_wait_ms: float = 0.0
    """Wait for batches in a step on this rank, averaged over the steps."""

    @property
    def samples_per_second(self) -> float:
        """Samples per second over all workers."""
        return self.samples / self.seconds

    @property
    def step_ms(self) -> float:
        """Mean duration of an optimizer step, in milliseconds."""
        return 1000 * self.seconds / self.steps


class Clock:
    """Stopwatch of a training, in laps; the device is synchronized at the end of each."""

    def __init__(self, device: torch.device, *, warmup_steps: int, compiling: "Stopwatch | None" = None) -> None:
        self._device, self._warmup_steps, self._compiling = device, warmup_steps, compiling
        self.laps: list[Lap] = []
        self._cold: Lap | None = None
        self._steps, self._since, self._compiled_s = 0, 0.0, 0.0

    def resume(self) -> None:
        """Start a lap, at the beginning or after a pause."""
        synchronize(self._device)
        self._compiled_s = self._compiling.seconds if self._compiling else 0.0
        self._since = time.perf_counter()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the block from the lap."""
        synchronize(self._device)
        start = time.perf_counter()
        yield
        self._since += time.perf_counter() - start

    @property
    def has_compiled(self) -> bool:
        """True if something was compiled since the last `count` or `resume`."""
        return self._compiling is not None and self._compiling.seconds > self._compiled_s

    def lap(self, *, steps: int, samples: int) -> Lap:
        """End the lap and start the next."""
        synchronize(self._device)
        now = time.perf_counter()
        lap = Lap(steps, samples, now - self._since)
        self._since = now
        return lap

    def count(self, lap: Lap, *, is_disturbed: bool = False) -> None:
        """Count a lap as steady if it started after the warm-up and no rank compiled anything (``is_disturbed``)."""
        if self._steps >= self._warmup_steps and not is_disturbed:
            self.laps.append(lap)
        elif not self.laps:
            self._cold = lap
        self._steps += lap.steps
        self._compiled_s = self._compiling.seconds if self._compiling else 0.0

    @property
    def steady(self) -> list[Lap]:
        """Laps that count, without short ones at the end of an epoch; the cold one if training ended in its warm-up."""
        if not self.laps:
            return [self._cold] if self._cold else []
        longest = max(lap.steps for lap in self.laps)
        return [lap for lap in self.laps if lap.steps >= longest / 2]


class DataWait:
    """Time that steps wait for their batches, measured during training.

    On a GPU the host runs ahead of the device, so that a wait of the host may cost nothing. There the time is taken
    by CUDA events: from the end of the work queued before a batch was requested until the batch has arrived.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[Any, Any]] = []
        self._steps: list[list[tuple[Any, Any]]] = []

    def timed(self, stream: Stream) -> Stream:
        """Yield the same micro-batches, and record the wait for each."""
        while True:
            start = self._read_clock()
            if (pair := next(stream, None)) is None:
                return
            self._spans.append((start, self._read_clock()))
            yield pair

    def end_step(self) -> None:
        """Assign the waits since the last call to one step."""
        self._steps.append(self._spans)
        self._spans = []

    def take(self) -> list[float]:
        """Return the milliseconds that each step since the last call has waited. Synchronize the device first."""
        steps, self._steps = self._steps, []
        if self._device.type == "cuda":
            return [sum(start.elapsed_time(end) for start, end in spans) for spans in steps]
        return [sum(1e3 * (end - start) for start, end in spans) for spans in steps]

    def _read_clock(self) -> Any:
        """Return a CUDA event in the current stream, or the host's clock on CPU."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

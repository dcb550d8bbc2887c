"""Measurements while training runs: laps in steady state, waits for data, the exchange of gradients, GPUs.

Laps leave out warm-up, evaluation and saving.

Ranks begin an exchange when their first gradients are ready and end it together. So the rank whose exchange is
shortest came last and waited for no other: its time is that of the link. Where the link takes as long as ever, a longer
time on the other ranks is their wait for that rank.
"""

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import mean, median
from typing import TYPE_CHECKING, Any

import torch

from pipeline.protocol.events import Point
from pipeline.protocol.trial import Training
from pipeline.protocol.trial_result import Communication, Energy, Spike
from pipeline.train.order import MicroBatch
from pipeline.train.ranks import gather, synchronize, uuid_of

if TYPE_CHECKING:
    from pipeline.train.compilation import Stopwatch
    from pipeline.train.state import State

Stream = Iterator[tuple[MicroBatch, Any]]
SPIKE = 3.0  # Ratio to the median from which the exchange of an interval is a spike
LEAST_INTERVALS = 5  # Intervals before the first that can be a spike
TOLD_S = 1.0  # Spikes of one cause that have cost this many seconds in total are reported while it trains
_REMEMBERED = 200


@dataclass(frozen=True)
class Lap:
    """A timed interval of training steps, with the samples of all workers."""

    steps: int
    samples: int
    seconds: float
    data_wait_ms: float = 0.0  # Wait for batches in a step: the longest of any rank, averaged over the steps
    own_wait_ms: float = 0.0  # Wait for batches in a step on this rank, averaged over the steps

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
        started, self._since = self._since, time.perf_counter()
        return Lap(steps, samples, self._since - started)

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


class CommunicationMeter:
    """Record of the exchange in each report interval; equal on all ranks, of which rank 0 reports."""

    def __init__(self, s: "State") -> None:
        self._s = s
        self._nodes = gather(s.rank.node, rank=s.rank)
        self._link, self._longest = deque[float](maxlen=_REMEMBERED), deque[float](maxlen=_REMEMBERED)
        self._steps, self._step_s, self._exchange_s = 0, 0.0, 0.0
        self._spikes: list[Spike] = []

    def own_ms(self) -> float:
        """Return the milliseconds of this rank's exchange in a step since the last call; NaN if they are unknown."""
        known = self._s.strategy.exchange_ms(self._s.wrapped)
        return math.nan if known is None else known

    def record(self, ranks_ms: Sequence[float], *, lap: Lap, step: int) -> list[Point]:
        """Record an interval that ends with ``step``, and return its metrics; none if a rank's time is unknown."""
        if any(map(math.isnan, ranks_ms)):
            return []
        link, longest = min(ranks_ms), max(ranks_ms)
        if len(self._link) >= LEAST_INTERVALS:  # a spike of the link, or else of the wait for one rank
            for ms, before, is_late in ((link, median(self._link), False), (longest, median(self._longest), True)):
                if ms > SPIKE * before:
                    rank = ranks_ms.index(link if is_late else longest)
                    spike = Spike(
                        first_step=step - lap.steps + 1,
                        last_step=step,
                        ms=ms,
                        median_ms=before,
                        rank=rank,
                        node=self._nodes[rank],
                        is_late=is_late,
                        lost_s=lap.steps * (ms - before) / 1000,
                    )
                    self._spikes.append(spike)
                    same = (one for one in self._spikes if (one.rank, one.is_late) == (rank, is_late))
                    if sum(one.lost_s for one in same) >= TOLD_S:  # an interval alone is a third of a second
                        self._s.warn(spike.sentence, subject=f"exchange {'late' if is_late else 'slow'} {rank}")
                    break
        self._link.append(link)
        self._longest.append(longest)
        self._steps += lap.steps
        self._step_s += lap.seconds
        self._exchange_s += lap.steps * link / 1000
        return [
            Point("time/window_communication_ms", step, link),
            Point("time/window_communication_share", step, link / lap.step_ms),
        ]

    @property
    def result(self) -> Communication | None:
        """The record as a whole; None if nothing was recorded."""
        if not self._steps:
            return None
        return Communication(
            ms=1000 * self._exchange_s / self._steps,
            share=self._exchange_s / self._step_s,
            spikes=len(self._spikes),
            lost_s=sum(spike.lost_s for spike in self._spikes),
            worst=max(self._spikes, key=lambda spike: spike.lost_s, default=None),
        )


class GpuGauge:
    """Utilization of a rank's GPUs during training, from the driver's management library (NVML)."""

    def __init__(self, devices: Sequence[int]) -> None:
        self._devices = list(devices)
        self._readings: list[list[float]] = []

    def read(self) -> None:
        """Sample the utilization: the share of the last fraction of a second in which a kernel ran."""
        if not self._devices:
            return
        import pynvml  # only here: a machine without GPUs pays nothing

        try:
            self._readings.append([float(torch.cuda.utilization(device)) for device in self._devices])
        except (pynvml.NVMLError, RuntimeError):  # a part of a GPU (MIG) has no utilization
            self._devices = []

    def means(self) -> list[float]:
        """Return the mean utilization of each device in percent; empty without samples."""
        return [mean(column) for column in zip(*self._readings, strict=True)] if self._devices else []


class EnergyMeter:
    """Difference of the energy counters of a rank's GPUs since the meter was made; only a training reads them."""

    def __init__(self, s: "State") -> None:
        self._rank = s.rank
        self._uuids = [uuid_of(device) for device in s.strategy.gpus] if isinstance(s.trial, Training) else []
        self._before = _millijoules(self._uuids)

    def of(self, samples: int) -> Energy | None:
        """Return the energy of all GPUs so far; None if any of them doesn't count it. Collective."""
        after = _millijoules(self._uuids)
        own = {uuid: after[uuid] - before for uuid, before in self._before.items() if uuid in after}
        ranks = gather((self._uuids, own), rank=self._rank)
        uuids = {uuid for known, _ in ranks for uuid in known}  # ranks may share a GPU
        used = {uuid: spent for _, spents in ranks for uuid, spent in spents.items()}
        if not uuids or not samples or uuids != used.keys():
            return None
        return Energy(joules=sum(used.values()) / 1000, samples=samples)


def _millijoules(uuids: Iterable[str]) -> dict[str, int]:
    """Read the counters, in mJ since the driver was loaded, of the GPUs that have one: from Volta on, none of MIG."""
    if not (wanted := list(uuids)):
        return {}
    import pynvml  # only here: a machine without GPUs pays nothing

    try:
        pynvml.nvmlInit()
        try:
            handles = {uuid: pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in wanted}
            return {uuid: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) for uuid, handle in handles.items()}
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return {}

"""Meters of the hardware while training runs: time of gradient synchronization, utilization, and energy.

Ranks begin an exchange when their first gradients are ready and end it together. So the rank whose exchange is
shortest came last and waited for no other: its time is that of the link. Where the link takes as long as ever, a longer
time on the other ranks is their wait for that rank.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import mean, median
from typing import TYPE_CHECKING

import torch

from pipeline.protocol.events import Point
from pipeline.protocol.trial import Training
from pipeline.protocol.trial_result import Communication, Energy, Spike
from pipeline.train.clock import Lap
from pipeline.train.ranks import gather, uuid_of

if TYPE_CHECKING:
    from pipeline.train.state import State

SPIKE = 3.0
"""Ratio to the median from which the exchange of an interval is a spike."""
LEAST_INTERVALS = 5
"""Intervals before the first that can be a spike."""
TOLD_S = 1.0
"""Seconds that a spike has cost from which it is told at once."""
_REMEMBERED = 200


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
                    if spike.lost_s >= TOLD_S:
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

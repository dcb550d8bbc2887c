"""Time of gradient exchange while training runs, by report interval, and intervals in which it spikes.

Ranks begin an exchange when their first gradients are ready and end it together. So the rank whose exchange is
shortest came last and waited for no other: its time is that of the link. Where the link takes as long as ever, a longer
time on the other ranks is their wait for that rank.
"""

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from pipeline.protocol.events import Outbox, Point, Warned
from pipeline.protocol.trial_result import Communication, Spike
from pipeline.training.context import TrainContext
from pipeline.training.meters.clock import Lap
from pipeline.training.ranks.collectives import gather

SPIKE = 3.0
"""Ratio to the median from which the exchange of an interval is a spike."""
LEAST_INTERVALS = 5
"""Intervals before the first that can be a spike."""
TOLD_S = 1.0
"""Seconds that a spike has cost from which it is told at once."""
_REMEMBERED = 200


@dataclass
class CommunicationMeter:
    """Record of the exchange in each report interval; equal on all ranks, of which rank 0 reports."""

    context: TrainContext
    outbox: Outbox
    _link: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    _longest: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    _steps: int = 0
    _step_s: float = 0.0
    _exchange_s: float = 0.0
    _spikes: list[Spike] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.nodes = gather(self.context.rank.node, rank=self.context.rank)

    def own_ms(self) -> float:
        """Return the milliseconds of this rank's exchange in a step since the last call; NaN if they are unknown."""
        known = self.context.strategy.exchange_ms(self.context.wrapped)
        return float("nan") if known is None else known

    def record(self, ranks_ms: Sequence[float], *, lap: Lap, step: int) -> list[Point]:
        """Record an interval that ends with ``step``, and return its metrics; none if a rank's time is unknown."""
        if any(map(math.isnan, ranks_ms)):
            return []
        link, longest = min(ranks_ms), max(ranks_ms)
        if len(self._link) >= LEAST_INTERVALS:
            self._judge(ranks_ms, lap=lap, step=step)
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

    def _judge(self, ranks_ms: Sequence[float], *, lap: Lap, step: int) -> None:
        """Note a spike of the link, or else of the wait for one rank."""
        for ms, before, is_late in (
            (min(ranks_ms), median(self._link), False),
            (max(ranks_ms), median(self._longest), True),
        ):
            if ms > SPIKE * before:
                rank = ranks_ms.index(min(ranks_ms) if is_late else max(ranks_ms))
                spike = Spike(
                    first_step=step - lap.steps + 1,
                    last_step=step,
                    ms=ms,
                    median_ms=before,
                    rank=rank,
                    node=self.nodes[rank],
                    is_late=is_late,
                    lost_s=lap.steps * (ms - before) / 1000,
                )
                self._spikes.append(spike)
                self._tell(spike)
                return

    def _tell(self, spike: Spike) -> None:
        if spike.lost_s < TOLD_S or not self.context.rank.is_first:
            return
        subject = f"exchange {'late' if spike.is_late else 'slow'} {spike.rank}"
        trial = self.context.trial.name
        self.outbox.event(Warned(time=time.time(), trial=trial, message=spike.sentence, subject=subject))

"""The loss of every step without waiting for the device in every step."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from pipeline.contract import Rank, Trial
from pipeline.errors import TrainingError
from pipeline.events import Metrics, Outbox, Point
from pipeline.training.clock import Clock, Lap
from pipeline.training.gauge import GpuGauge
from pipeline.training.order import Order


@dataclass(kw_only=True)
class Meter:
    """Collects each step's share of the loss on the device; a flush adds them up over all ranks in one exchange.

    So the loss in the report is the mean over the global batch, exact at any world size, and the host waits for the
    device once in a flush instead of once in a step.
    """

    trial: Trial
    rank: Rank
    order: Order
    clock: Clock
    gauge: GpuGauge
    outbox: Outbox
    latest: dict[str, float] = field(default_factory=dict)
    """The latest value of every metric."""
    first_losses: tuple[float, ...] = ()
    """Of as many steps as a measurement takes."""
    stop_agreed: bool = False
    """Whether the driver has asked any rank to stop, as of the last flush: all ranks know it after the same step."""
    _losses: list[torch.Tensor] = field(default_factory=list)
    _norms: list[torch.Tensor] = field(default_factory=list)
    _rates: list[float] = field(default_factory=list)
    _samples: int = 0

    def add(self, loss: torch.Tensor, *, norm: torch.Tensor | None, rate: float, samples: int) -> None:
        """One step: this rank's weighted loss (scalar), the global gradient norm if known, lr, global batch size."""
        self._losses.append(loss)
        self._rates.append(rate)
        self._samples += samples
        if norm is not None:
            self._norms.append(norm)

    def flush(self, *, step: int, epoch: int) -> None:
        """Report all steps since the last flush, up to ``step`` in ``epoch``, both counted from 1. Collective.

        Raises:
            TrainingError: a loss is NaN or infinite. All ranks see the same sums and raise together.
        """
        asked = torch.full_like(self._losses[0], float(self.outbox.stop_asked))
        sums = torch.stack([*self._losses, asked])
        if self.rank.world_size > 1:
            dist.all_reduce(sums)
        losses, self.stop_agreed = sums[:-1], bool(sums[-1])
        columns = {"train/loss": losses.tolist(), "train/learning_rate": self._rates}
        if self._norms:
            columns["train/gradient_norm"] = torch.stack(self._norms).tolist()
        lap = self.clock.lap(steps=len(losses), samples=self._samples)
        self._losses, self._norms, self._rates, self._samples = [], [], [], 0
        self.gauge.read()
        measure = self.trial.experiment.measure
        self.first_losses = (*self.first_losses, *columns["train/loss"])[: measure.total_steps]
        first = step - len(losses) + 1
        points = [Point(name, first + i, value) for name, column in columns.items() for i, value in enumerate(column)]
        points.append(Point("throughput/samples_per_second", step, lap.samples_per_second))
        points.append(Point("time/step_ms", step, lap.step_ms))
        self.send(points, step=step, epoch=epoch)
        self._stop_if_not_finite(columns["train/loss"], first=first)

    def send(self, points: list[Point], *, step: int, epoch: int) -> None:
        """Report points of any metrics; ``step`` and ``epoch`` (counted from 1) say how far training is."""
        self.latest.update({point.name: point.value for point in points})
        if self.rank.is_first and points:
            event = Metrics(
                time=time.time(),
                trial=self.trial.name,
                step=step,
                epoch=epoch,
                points=tuple(points),
                repeat=self.trial.repeat,
            )
            self.outbox.event(event)

    def state(self) -> dict[str, Any]:
        """What a resumed training can't know: numbers and texts. Call it after a flush."""
        lap = self.clock.steady[-1]
        return {
            "latest": dict(self.latest),
            "first_losses": list(self.first_losses),
            "lap": [lap.steps, lap.samples, lap.seconds],
        }

    def restore(self, state: Mapping[str, Any], *, is_over: bool) -> None:
        """Go on from `state`; a training that is over has no more steps to time, so the saved pace is the one."""
        self.latest = dict(state["latest"])
        self.first_losses = tuple(state["first_losses"])
        if is_over:
            self.clock.laps.append(Lap(*state["lap"]))

    def _stop_if_not_finite(self, losses: list[float], *, first: int) -> None:
        for step, loss in enumerate(losses, start=first):
            if not abs(loss) < float("inf"):
                epoch, index = divmod(step - 1, self.order.steps_per_epoch)
                samples = self.order.global_batch(epoch, index)
                raise TrainingError(
                    f"the loss is {loss} in step {step} (epoch {epoch + 1}); "
                    f"its global batch is samples {', '.join(map(str, samples[:8]))}"
                    f"{f' ... ({len(samples)} in all)' if len(samples) > 8 else ''}. "
                    "Try a lower learning rate, train.clip_grad_norm, or train.precision: fp32"
                )

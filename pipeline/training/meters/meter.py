"""The meter of a training: every step's loss, reported without waiting for the device in every step."""

import time
from collections import deque
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist

from pipeline.config.reported import GRADIENT_NORM, LEARNING_RATE, LOSS, TRAIN
from pipeline.errors import ExperimentError
from pipeline.protocol.events import Metrics, Outbox, Point
from pipeline.protocol.trial import Measurement, Training
from pipeline.training.checks.coupling import Coupling
from pipeline.training.checks.nonfinite import Finiteness
from pipeline.training.context import TrainContext
from pipeline.training.feature import name_of, refuse_returned
from pipeline.training.meters.clock import Clock, DataWait, Lap
from pipeline.training.meters.communication import CommunicationMeter
from pipeline.training.meters.energy import EnergyMeter
from pipeline.training.meters.points import group_steps, iter_points
from pipeline.training.model.learning_rate import rates_by_metric
from pipeline.training.ranks.watch import waiting
from pipeline.training.step.plain import Stepped

SKIPPED = "train/skipped_steps"
WINDOWS = ("throughput/", "time/")
"""Prefixes of the names of metrics that describe a single window."""
_SENT_AGAIN = 30
"""Number of latest reports that a checkpoint keeps, to be sent again: a driver that was killed may not have recorded
them. It ignores those that it has."""
_LAST_STEPS = 20
"""Steps whose mean loss a result has if reports come by time: the number in the last report depends on the machine."""
REPORT_MS = 330.0
"""Milliseconds between two regular reports, unless a step takes longer. Ranks exchange what they report, which takes as
long as a short step, and MLflow takes a while for each point."""


@dataclass(kw_only=True)
class Meter:
    """Collector of each step's loss on the device; a flush sums the losses over all ranks in one exchange.

    The reported loss is the mean over the global batch, exact at any world size, and the host waits for the device
    once a flush instead of once a step.
    """

    context: TrainContext
    clock: Clock
    outbox: Outbox
    latest: dict[str, float] = field(default_factory=dict)
    """The latest value of every metric."""
    first_losses: tuple[float, ...] = ()
    """Losses of the first steps, as many as a measurement has."""
    step: int = 0
    """Steps done by the last flush."""
    window_s: float = 0.0
    """Seconds that the steps of the last flush have taken on average of the ranks; equal on all ranks."""
    stop_agreed: bool = False
    """True if the driver had asked any rank to stop by the last flush; equal on all ranks."""
    _losses: list[torch.Tensor] = field(default_factory=list)
    _samples: int = 0
    _skipped_before: int = 0
    _last_losses: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST_STEPS))
    _sent: deque[Metrics] = field(default_factory=lambda: deque(maxlen=_SENT_AGAIN))

    def __post_init__(self) -> None:
        context = self.context
        self.trial, self.rank = context.trial, context.rank
        self.cadence, self.gauge, self.waits = Cadence(context), GpuGauge(context.gpus), DataWait(context.device)
        self.communication = CommunicationMeter(context, self.outbox)
        self.energy = EnergyMeter(context)
        self.coupling = Coupling(context)
        self.finiteness = Finiteness(trial=context.trial, rank=context.rank, order=context.order, outbox=self.outbox)

    def add(self, result: Stepped, *, samples: int) -> None:
        """Add the result of a step; ``samples`` is the size of its global batch."""
        self.waits.end_step()
        self._losses.append(result.loss)
        self._samples += samples

    def flush(self, *, step: int, epoch: int) -> None:
        """Report all steps since the last flush, up to ``step`` in ``epoch``, both counted from 1. Collective.

        Raises:
            TrainingError: a loss or gradient is NaN or infinite. All ranks see the same sums and raise together.
        """
        lap = self.clock.lap(steps=len(self._losses), samples=self._samples)
        waits = self.waits.take()
        flags = [self.outbox.stop_asked, self.clock.has_compiled, lap.step_ms]
        steps = len(self._losses)
        own = torch.stack(self._losses).reshape(steps, -1).T  # the loss, and logs if there are any
        alone = [self.communication.own_ms(), *waits]
        ranks = self._of_all_ranks(torch.cat([own.flatten(), own.new_tensor([*flags, *alone])]))
        # Gathered, since the rounding of an all-reduce would depend on how many steps are reported together.
        slowest = float(ranks[:, -len(waits) :].amax(0).mean())
        *sums, stop_asked, has_compiled, step_ms = ranks[:, : -len(alone)].sum(0).tolist()
        losses, *logs = [sums[first : first + steps] for first in range(0, own.numel(), steps)]
        names = self.context.seen.log_names or ()
        lap = replace(lap, data_wait_ms=slowest, own_wait_ms=mean(waits))
        self.step, self.stop_agreed = step, bool(stop_asked)
        self.clock.count(lap, is_disturbed=bool(has_compiled))
        self.cadence.reported(step, step_ms=step_ms / self.rank.world_size)
        self.window_s = steps * step_ms / self.rank.world_size / 1000
        self.gauge.read()
        measure = self.trial.experiment.benchmark
        self.first_losses = (*self.first_losses, *losses)[: measure.total_steps]
        first = step - len(losses) + 1
        self._last_losses.extend(losses)
        every = zip((LOSS, *names), (losses, *logs), strict=True)
        columns = {name: dict(enumerate(values, first)) for name, values in every}
        columns |= self._rates(range(first, step + 1)) | self._of_features(taken=columns)
        points = self._of_steps(columns, first=first, count=len(losses))
        points += self._of_window(lap, step=step)
        points += self.communication.record(ranks[:, -len(alone)].tolist(), lap=lap, step=step)
        self._losses, self._samples = [], 0
        self.send(points, step=step, epoch=epoch, steps=steps, losses=losses)
        norms = columns.get(GRADIENT_NORM, {})
        norm_of_each = [norms.get(number, 0.0) for number in range(first, step + 1)]
        self.finiteness.judge(losses, norms=norm_of_each, own=own[0], first=first)
        if isinstance(self.trial, Measurement):  # its windows are short, and reporting would be a large part of them
            self.clock.resume()

    def _of_steps(self, columns: Mapping[str, Mapping[int, float]], *, first: int, count: int) -> list[Point]:
        """Return the points of the first ``count`` steps since the last report, the first of which is ``first``."""
        every = self.trial.experiment.train.log_every_steps
        groups = group_steps(first, first + count - 1, size=None if every == "auto" else every)
        return list(iter_points(columns, groups, skipped=set(self.finiteness.skipped)))

    def _rates(self, steps: range) -> dict[str, dict[int, float]]:
        """Return the learning rates of parameter groups, which nothing has changed in these steps."""
        rates = [float(group["lr"]) for group in self.context.optimizer.param_groups]
        groups = {} if self.trial.experiment.optimizers else rates_by_metric(rates)
        return {name: dict.fromkeys(steps, rate) for name, rate in {LEARNING_RATE: rates[0], **groups}.items()}

    def _of_features(self, *, taken: Container[str]) -> dict[str, dict[int, float]]:
        """Return what the features of the training report of its steps.

        Raises:
            ExperimentError: it is no table of numbers, or has a name that is ``taken``.
        """
        columns: dict[str, dict[int, float]] = {}
        for feature in self.context.features:
            found = feature.take_columns()
            if not isinstance(found, Mapping) or not all(isinstance(column, Mapping) for column in found.values()):
                raise refuse_returned(feature, "take_columns", found, instead="{name: {step: value}}, or {}")
            for name, column in found.items():
                if name in taken:
                    raise ExperimentError.of("features", f"{name_of(feature)} reports {name}, which is taken")
                values = list(column.values())
                columns[name] = dict(
                    zip(column, torch.stack(values).tolist() if torch.is_tensor(values[0]) else values, strict=True)
                )
        return columns

    def _of_window(self, lap: Lap, *, step: int) -> Iterator[Point]:
        """Yield what is reported once for the steps since the last report."""
        yield Point("throughput/samples_per_second", step, lap.samples_per_second)
        yield Point("time/step_ms", step, lap.step_ms)
        yield Point("time/window_data_wait_ms", step, lap.data_wait_ms)
        if self.trial.is_elastic:
            yield Point("throughput/workers", step, self.rank.world_size)
        if self.trial.experiment.train.on_nonfinite == "skip":
            yield Point(SKIPPED, step, self._skipped_before + len(self.finiteness.skipped))

    def _of_all_ranks(self, own: torch.Tensor) -> torch.Tensor:
        """Gather each rank's values, shape (ranks, values), in double precision on the CPU."""
        if self.rank.world_size == 1:
            return own.double().cpu()[None]
        parts = [torch.empty_like(own) for _ in range(self.rank.world_size)]
        with waiting():
            dist.all_gather(parts, own)
            return torch.stack(parts).double().cpu()

    @property
    def reached(self) -> dict[str, float]:
        """Latest value of every metric, without those of single windows, which the result summarizes itself."""
        found = {name: value for name, value in self.latest.items() if not name.startswith(WINDOWS)}
        if self._last_losses and self.trial.experiment.train.log_every_steps == "auto":
            found[f"{TRAIN}{LOSS}"] = mean(self._last_losses)
        return found

    def send(self, points: list[Point], *, step: int, epoch: int, steps: int = 0, losses: Sequence[float] = ()) -> None:
        """Report points of any metrics at ``step`` of ``epoch``, both counted from 1.

        Args:
            points: values of metrics.
            step: training steps so far.
            epoch: the epoch under way.
            steps: training steps since the last report.
            losses: losses of these steps.
        """
        self.latest.update({point.name: point.value for point in points})
        if self.rank.is_first and points:
            event = Metrics(
                time=time.time(),
                trial=self.trial.name,
                step=step,
                epoch=epoch,
                points=tuple(points),
                repeat=self.trial.repeat,
                steps=steps,
                losses=tuple(losses) if isinstance(self.trial, Training) else (),
            )
            self._sent.append(event)
            self.outbox.event(event)

    def state(self) -> dict[str, Any]:
        """Return the state to checkpoint, numbers and strings. Call it after a flush."""
        lap = self.clock.steady[-1]
        return {
            "latest": dict(self.latest),
            "first_losses": list(self.first_losses),
            "last_losses": list(self._last_losses),
            "lap": [lap.steps, lap.samples, lap.seconds, lap.data_wait_ms, lap.own_wait_ms],
            "sent": [event.model_dump(mode="json") for event in self._sent],
        }

    def restore(self, state: Mapping[str, Any], *, is_over: bool) -> None:
        """Load `state` and send its reports again; a finished training (``is_over``) takes its saved lap, too."""
        self.latest = dict(state["latest"])
        self.first_losses = tuple(state["first_losses"])
        self._last_losses.extend(state["last_losses"])
        for event in map(Metrics.model_validate, state["sent"] if self.rank.is_first else ()):
            self._sent.append(event)
            self.outbox.event(event)
        self._skipped_before = int(self.latest.get(SKIPPED, 0))
        if is_over:
            self.clock.laps.append(Lap(*state["lap"]))


class Cadence:
    """Schedule of reports: one in `REPORT_MS`, at the latest after a step. Equal on all ranks."""

    def __init__(self, context: TrainContext) -> None:
        self._context = context
        self._due = self._find_next(0, interval=1)

    def start(self, steps: int) -> None:
        """Begin after ``steps`` steps, of which a checkpoint has the last."""
        self._due = self._find_next(steps, interval=1)

    def is_due(self, steps: int) -> bool:
        """Return True if a report is due after ``steps`` steps.

        It is due by time, at the end of an epoch, and before an evaluation or a checkpoint. A measurement reports after
        its warm-up and after each of its windows.
        """
        return steps >= self._due

    def reported(self, steps: int, *, step_ms: float) -> None:
        """Note a report after ``steps`` steps; ``step_ms`` is the step's duration averaged over ranks."""
        self._due = self._find_next(steps, interval=max(1, int(REPORT_MS / step_ms)))

    def _find_next(self, steps: int, *, interval: int) -> int:
        """Return the steps after which the next report is due, if it is due by time after ``interval`` more."""
        context, measure = self._context, self._context.experiment.benchmark
        if isinstance(context.trial, Measurement):
            since = steps - measure.warmup_steps
            due = measure.warmup_steps if since < 0 else steps + measure.steps - since % measure.steps
            regular: list[int | None] = []
        else:
            due = steps + interval
            saved = context.experiment.checkpoint.every_steps if context.trial.saves else None
            regular = [saved, context.experiment.train.evaluate_every_steps]
        ends = [
            (steps // every + 1) * every for every in (context.order.steps_per_epoch, *regular) if every is not None
        ]
        return min(due, *ends, max(context.steps, steps + 1))


@dataclass
class GpuGauge:
    """Utilization of a rank's GPUs during training, from the driver's management library (NVML)."""

    devices: list[int]
    """CUDA indices; empty on CPU or where utilization isn't available."""
    _readings: list[list[float]] = field(default_factory=list)

    def read(self) -> None:
        """Sample the utilization: the share of the last fraction of a second in which a kernel ran."""
        if not self.devices:
            return
        import pynvml  # only here: a machine without GPUs pays nothing

        try:
            self._readings.append([float(torch.cuda.utilization(device)) for device in self.devices])
        except (pynvml.NVMLError, RuntimeError):  # a part of a GPU (MIG) has no utilization
            self.devices = []

    def means(self) -> list[float]:
        """Return the mean utilization of each device in percent; empty without samples."""
        return [mean(column) for column in zip(*self._readings, strict=True)] if self.devices else []

"""The meter of a training: every step's loss, reported without waiting for the device in every step."""

import math
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import cycle
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.errors import ExperimentError
from pipeline.experiment.reported import GRADIENT_NORM, LEARNING_RATE, LOSS, TRAIN
from pipeline.protocol.events import LAST_STEPS, Metrics, Point
from pipeline.protocol.trial import Measurement, Training
from pipeline.train.gauges import Clock, CommunicationMeter, DataWait, EnergyMeter, GpuGauge, Lap, Stream
from pipeline.train.hooks import name_of
from pipeline.train.nonfinite import Finiteness
from pipeline.train.watch import waiting

if TYPE_CHECKING:
    from pipeline.train.state import State, Stepped

SKIPPED = "train/skipped_steps"
WINDOWS = ("throughput/", "time/")  # Prefixes of the names of metrics that describe a single window
_SENT_AGAIN = 30
"""Latest reports that a checkpoint keeps: a driver that was killed may not have them, and ignores those that it has."""
REPORT_MS = 330.0  # Milliseconds between two regular reports, unless a step takes longer


class Meter:
    """Collector of each step's loss on the device; a flush sums them over all ranks in one exchange, exactly."""

    def __init__(self, s: "State") -> None:
        self._s = s
        self.latest: dict[str, float] = {}  # The latest value of every metric
        self.first_losses: tuple[float, ...] = ()  # Losses of the first steps, as many as a measurement has
        self.trained_s = 0.0
        """Seconds of all steps since the start of the training, on average of the ranks and equal on all of them."""
        self.stop_agreed = False  # True if the driver had asked any rank to stop by the last flush; equal on all ranks
        self.clock = Clock(s.device, warmup_steps=s.experiment.benchmark.warmup_steps, compiling=s.compiling)
        self.finiteness = Finiteness(s)
        self.communication, self.energy, self.gauge = CommunicationMeter(s), EnergyMeter(s), GpuGauge(s.strategy.gpus)
        self._waits = DataWait(s.device)
        self._stepped: list[Stepped] = []
        self._skipped_before = self._due = 0
        self._last_losses = deque[float](maxlen=LAST_STEPS)
        self._sent = deque[Metrics](maxlen=_SENT_AGAIN)

    def timed(self, stream: Stream) -> Stream:
        """Yield the same micro-batches, and record the wait for each."""
        return self._waits.timed(stream)

    def resume(self) -> None:
        """Start the clock, at the beginning or after a pause."""
        if self._due <= self._s.step:
            self._due = self._find_next(interval=1)
        self.clock.resume()

    def pause(self) -> AbstractContextManager[None]:
        """Return a context that isn't part of the time of steps."""
        return self.clock.pause()

    def add(self, stepped: "Stepped") -> None:
        """Add the result of the step that ``s.step`` has just counted."""
        self._waits.end_step()
        self._stepped.append(stepped)
        if stepped.skipped:
            self.finiteness.note_skipped(self._s.step)

    def is_due(self, step: int) -> bool:
        """Return True if a report is due after ``step`` steps, on all ranks alike, see `_find_next`."""
        return step >= self._due or self.finiteness.is_exhausted

    def flush(self) -> None:
        """Report all steps since the last flush. Collective; all ranks see the same sums and raise together."""
        s, stepped = self._s, self._stepped
        assert s.facts is not None
        count, step = len(stepped), s.step
        first = step - count + 1
        steps, names = range(first, step + 1), (LOSS, *s.facts.log_names)
        sizes = [s.order.batch_size(number - 1) for number in steps]
        lap = self.clock.lap(steps=count, samples=sum(sizes))
        waits = self._waits.take()
        flags = [s.outbox.stop_asked, self.clock.has_compiled, lap.step_ms, self.communication.own_ms(), *waits]
        own = torch.cat([torch.stack([one.sums[name] for one in stepped]).to(s.device) for name in names])
        # Gathered, since the rounding of an all-reduce would depend on how many steps are reported together.
        ranks = self._gather_ranks(torch.cat([own, own.new_tensor(flags)]))
        stop_asked, has_compiled, step_ms = ranks[:, own.numel() : own.numel() + 3].sum(0).tolist()
        sums = ranks[:, : own.numel()].sum(0).tolist()
        lap = replace(lap, data_wait_ms=float(ranks[:, -count:].amax(0).mean()), own_wait_ms=fmean(waits))

        self.stop_agreed, step_ms = bool(stop_asked), step_ms / s.rank.world_size
        self.trained_s += count * step_ms / 1000
        self.clock.count(lap, is_disturbed=bool(has_compiled))
        self._due = self._find_next(interval=max(1, int(REPORT_MS / step_ms)))
        self.gauge.read()

        items = _read_numbers([one.count for one in stepped])
        if any(own_count is not None and own_count < 0 for own_count in items):
            key = "loss" if s.experiment.task is None else "task"
            raise ExperimentError.of(key, "returned a negative Loss.count; it is the number of items, or their weight")
        counts = [sizes[index] if own_count is None else own_count for index, own_count in enumerate(items)]
        means = [value / divisor if divisor else 0.0 for value, divisor in zip(sums, cycle(counts), strict=False)]
        columns = {name: dict(zip(steps, means[n * count :], strict=False)) for n, name in enumerate(names)}
        losses = list(columns[LOSS].values())
        for name in dict.fromkeys(name for one in stepped for name in one.rates):
            columns[name] = {at: one.rates[name] for at, one in zip(steps, stepped, strict=True) if name in one.rates}
        for name in dict.fromkeys(name for one in stepped for name in one.norms):
            norms = _read_numbers([one.norms.get(name) for one in stepped])
            columns[name] = {at: norm for at, norm in zip(steps, norms, strict=True) if norm is not None}
        self._add_reports(columns, step=step)

        self.first_losses = (*self.first_losses, *losses)[: s.experiment.benchmark.total_steps]
        self._last_losses.extend(losses)
        every = s.experiment.train.log_every_steps
        groups = group_steps(first, step, size=None if every == "auto" else every)
        window = {
            "throughput/samples_per_second": lap.samples_per_second,
            "time/step_ms": lap.step_ms,
            "time/window_data_wait_ms": lap.data_wait_ms,
            **({"throughput/workers": s.rank.world_size} if s.trial.is_elastic else {}),
        }
        if s.experiment.train.on_nonfinite == "skip":
            window[SKIPPED] = self._skipped_before + len(self.finiteness.skipped)
        points = list(iter_points(columns, groups, skipped=set(self.finiteness.skipped)))
        points += [Point(name, step, value) for name, value in window.items()]
        points += self.communication.record(ranks[:, own.numel() + 3].tolist(), lap=lap, step=step)
        self._stepped = []
        self.send(points, steps=count, losses=losses)
        all_norms = columns.get(GRADIENT_NORM, {})
        self.finiteness.judge(losses, norms=[all_norms.get(at, 0.0) for at in steps], own=own[:count], first=first)
        if isinstance(s.trial, Measurement):  # its windows are short, and reporting would be a large part of them
            self.clock.resume()

    @property
    def reached(self) -> dict[str, float]:
        """Latest value of every metric but those of single windows."""
        found = {name: value for name, value in self.latest.items() if not name.startswith(WINDOWS)}
        if self._last_losses and self._s.experiment.train.log_every_steps == "auto":
            found[f"{TRAIN}{LOSS}"] = fmean(self._last_losses)
        return found

    def send(self, points: Sequence[Point], *, steps: int = 0, losses: Sequence[float] = ()) -> None:
        """Report points of any metrics, and the ``losses`` of all ``steps`` since the last report."""
        s = self._s
        self.latest.update({point.name: point.value for point in points})
        if s.rank.is_first and points:
            step = points[-1].step  # those of the test set are of the best step
            event = Metrics(
                time=time.time(),
                trial=s.trial.name,
                step=step,
                epoch=s.epoch_of(step),
                points=tuple(points),
                repeat=s.trial.repeat,
                steps=steps,
                losses=tuple(losses) if isinstance(s.trial, Training) else (),
            )
            self._sent.append(event)
            s.outbox.event(event)

    def state(self) -> dict[str, Any]:
        """Return the state to checkpoint, numbers and strings. Call it after a flush."""
        lap = self.clock.steady[-1]
        return {
            "latest": dict(self.latest),
            "first_losses": list(self.first_losses),
            "last_losses": list(self._last_losses),
            "trained_s": self.trained_s,
            "lap": [lap.steps, lap.samples, lap.seconds, lap.data_wait_ms, lap.own_wait_ms],
            "sent": [event.model_dump(mode="json") for event in self._sent],
        }

    def restore(self, state: Mapping[str, Any], *, is_over: bool) -> None:
        """Load `state` and send its reports again; a finished training (``is_over``) also takes its saved lap."""
        self.latest, self.trained_s = dict(state["latest"]), state["trained_s"]
        self.first_losses = tuple(state["first_losses"])
        self._last_losses.extend(state["last_losses"])
        for event in map(Metrics.model_validate, state["sent"] if self._s.rank.is_first else ()):
            self._sent.append(event)
            self._s.outbox.event(event)
        self._skipped_before = int(self.latest.get(SKIPPED, 0))
        if is_over:
            self.clock.laps.append(Lap(*state["lap"]))

    def _find_next(self, *, interval: int) -> int:
        """Return the steps after which the next report is due: at most ``interval`` more.

        A measurement reports after its warm-up and after each of its windows.
        """
        s, measure = self._s, self._s.experiment.benchmark
        ends: list[int | None] = [s.order.steps_per_epoch]
        if isinstance(s.trial, Measurement):
            since = s.step - measure.warmup_steps
            due = measure.warmup_steps if since < 0 else s.step + measure.steps - since % measure.steps
        elif isinstance(s.trial, Training) and s.trial.is_quick:  # the steps after the warm-up are timed together
            due = measure.warmup_steps if s.step < measure.warmup_steps else s.steps
        else:
            due = s.step + interval
            saved = s.experiment.checkpoint.every_steps if s.trial.saves else None
            ends += [saved, s.experiment.train.evaluate_every_steps]
        regular = [(s.step // every + 1) * every for every in ends if every is not None]
        return min(due, *regular, max(s.steps, s.step + 1))

    def _gather_ranks(self, own: Tensor) -> Tensor:
        if self._s.rank.world_size == 1:
            return own.double().cpu()[None]
        parts = [torch.empty_like(own) for _ in range(self._s.rank.world_size)]
        with waiting():
            dist.all_gather(parts, own)
            return torch.stack(parts).double().cpu()

    def _add_reports(self, columns: dict[str, dict[int, float]], *, step: int) -> None:
        """Add what the hooks report of the steps until ``step``. Collective."""
        for hook in self._s.hooks:
            found = hook.report(self._s)
            try:
                values = {name: float(value) for name, value in found.items()}
            except (AttributeError, TypeError, ValueError, RuntimeError):
                message = f"{name_of(hook)}.report returned {type(found).__name__}; return numbers by name, or {{}}"
                raise ExperimentError.of("hooks", message) from None
            for name, value in values.items():
                if name in columns:
                    raise ExperimentError.of("hooks", f"{name_of(hook)} reports {name}, which is taken")
                columns[name] = {step: value}


def _read_numbers(values: Sequence[Tensor | None]) -> list[float | None]:
    """Read scalars from their device, all at once."""
    known = [value for value in values if value is not None]
    read = iter(torch.stack(known).double().tolist() if known else ())
    return [None if value is None else next(read) for value in values]


def group_steps(first: int, last: int, *, size: int | None) -> list[range]:
    """Split the steps of a report, counted from 1, into groups that end at multiples of ``size``; None: one group."""
    ends = [last] if size is None else sorted({*range(first + -first % size, last, size), last})
    starts = [first, *(end + 1 for end in ends[:-1])]
    return [range(start, end + 1) for start, end in zip(starts, ends, strict=True)]


def iter_points(
    columns: Mapping[str, Mapping[int, float]], groups: Sequence[range], *, skipped: Collection[int]
) -> Iterator[Point]:
    """Yield a point of each metric for each group of steps, at the group's last step.

    A learning rate has its value in the last step, any other metric its mean. The loss and gradient norms of several
    steps also have their lowest and highest value, as NAME_min and NAME_max. Steps that were skipped count only in a
    group without others. ``columns`` has the values of each metric by step.
    """
    for group in groups:
        counted = [step for step in group if step not in skipped] or group
        for name, column in columns.items():
            if not (values := [column[step] for step in counted if step in column]):
                continue
            is_rate = name.startswith(LEARNING_RATE)
            mean = values[-1] if is_rate else fmean(values) if all(map(math.isfinite, values)) else math.nan
            yield Point(f"{TRAIN}{name}", group[-1], values[0] if len(values) == 1 else mean)
            if len(values) > 1 and (name == LOSS or name.startswith(GRADIENT_NORM)):
                yield Point(f"{TRAIN}{name}_min", group[-1], min(values))
                yield Point(f"{TRAIN}{name}_max", group[-1], max(values))

"""Trials that rank 0 builds next to its part of a training, to be compared with it: their first steps and their events.

`turns` measures them in turn with the training. A trial that runs out of memory there is built again
with smaller micro-batches. If memory still runs out, it is measured by itself, once the training has freed its memory.
A process of its own would have no more memory, but outer launchers can't start one.
"""

import logging
import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from pipeline.errors import Stopped
from pipeline.protocol import estimates
from pipeline.protocol.events import AnyEvent, Finished, Outbox, Phase, Warned
from pipeline.protocol.trial import Baseline, Reference, Trial
from pipeline.protocol.trial_result import Spread, TrialResult
from pipeline.training.batches.rank_batches import MicroBatches
from pipeline.training.build import build
from pipeline.training.context import TrainContext
from pipeline.training.measuring.memory import check_free_memory, find_passing_bytes, free_training
from pipeline.training.meters.clock import synchronize
from pipeline.training.ranks.torch_errors import is_out_of_memory
from pipeline.training.ranks.watch import mark
from pipeline.training.step import train_step
from pipeline.training.step.dry_run import endless, without_updates
from pipeline.wording import first_line

LEAST_STEPS = 2
"""Fewest timed steps of the slowest trial in a slot: more slots give a narrower interval than longer ones."""
_SETTLING_S = 0.2
_MOST_TIMES = 2.0
"""Multiple of an interval's planned time at which it ends early, with fewer steps: a machine may get busy."""
_FIRST_STEPS, _FIRST_STEPS_S = 3, 10.0
"""Fewest first steps of a trial, whose losses are compared, and the seconds that more of them may take."""
_SHORTEST_S = 1e-5  # of a step, against a division by next to nothing

_log = logging.getLogger(__name__)

Complete = Callable[[TrainContext, Outbox], TrialResult]
"""Runs a trial that is built and returns its result."""
Compared = Baseline | Reference


@dataclass
class Player:
    """A trial that takes slots; ``context`` is None on ranks that only wait for it."""

    name: str
    context: TrainContext | None = None
    stream: MicroBatches | None = None
    step_s: list[float] = field(default_factory=list)
    """Seconds of a step in each slot."""

    def start(self, kept: ExitStack) -> Self:
        """Open the stream of batches; weights and buffers are kept until ``kept`` is closed."""
        if self.context is not None:
            kept.enter_context(without_updates(self.context))
            self.stream = endless(self.context)
        return self

    def take(self, *, steps: int, planned_s: float = math.inf) -> None:
        """Take one slot; its first step isn't timed, as it finds the caches of another trial.

        Where a single process computes, the slot ends once it takes far longer than planned: others wait for it.
        """
        if (context := self.context) is None or self.stream is None:
            return
        torch.set_num_threads(context.trial.cpus_per_worker)
        train_step(context, self.stream, step=0)
        synchronize(context.device)
        limit_s = math.inf if context.rank.world_size > 1 else _MOST_TIMES * planned_s
        start, done = time.perf_counter(), 0
        while done < LEAST_STEPS or (done < steps and time.perf_counter() - start < limit_s):
            train_step(context, self.stream, step=0)
            done += 1
        synchronize(context.device)
        self.step_s.append((time.perf_counter() - start) / done)

    def settle(self, step_s: float) -> float:
        """Start the loaders, warm the caches up, and return the seconds of a step.

        A step in a slot takes another time than one in training, or than a trial's first ones (``step_s``).
        """
        steps = max(LEAST_STEPS, math.ceil(_SETTLING_S / max(step_s, _SHORTEST_S)))
        self.take(steps=steps, planned_s=2 * _SETTLING_S)
        return max(self.step_s.pop(), _SHORTEST_S)


def expect_step_s(trial: Trial, *, training: Trial, step_s: float) -> float:
    """Return the seconds of a trial's step, if devices share the work evenly; ``step_s`` is that of a training."""
    units = [one.replicas * (one.cpus_per_worker if one.device == "cpu" else 1) for one in (training, trial)]
    return step_s * units[0] / units[1]


def find_first_steps(trial: Compared, *, step_s: float) -> int:
    """Return the number of a trial's first steps: fewer if a step takes long, since the training waits for them."""
    return max(_FIRST_STEPS, min(trial.max_steps, int(_FIRST_STEPS_S / step_s)))


def rates_over(slots: Sequence[float], *, batch: int) -> dict[str, Spread]:
    """Return throughput and step time over slots, by the names of `TrialResult`."""
    return {
        "samples_per_second": estimates.geometric_spread(slots),
        "step_ms": estimates.spread([1000 * batch / rate for rate in slots]),
    }


class _Failure(NamedTuple):
    """Reason for which a trial could not be measured."""

    message: str
    is_out_of_memory: bool


class _Measured(NamedTuple):
    """Events and result of a trial's first steps."""

    later: "_Later"
    result: TrialResult


class ComparedTrials:
    """The trials on rank 0 that a training is compared with; on other ranks there are none."""

    def __init__(self, training: TrainContext, *, step_s: float, outbox: Outbox, complete: Complete) -> None:
        """Prepare to build trials, next to a training that has just settled with steps of ``step_s`` seconds."""
        self.players: dict[str, Player] = {}
        """Trials that have taken their first steps, by name."""
        self.step_s: dict[str, float] = {}
        """Seconds of a step of each trial, by name."""
        self.training_step_s = step_s
        self._training, self._outbox, self._complete = training, outbox, complete
        self._needed = find_passing_bytes(training.device)
        self._rank = training.rank.model_copy(update={"world_size": 1, "local_world_size": 1})
        self._measured: dict[str, _Measured] = {}
        self._too_large: list[Compared] = []
        self._kept = ExitStack()

    @property
    def has_too_large(self) -> bool:
        """True if `measure_alone` has trials to measure."""
        return bool(self._too_large)

    def build(self, trial: Compared) -> None:
        """Build a trial and take its first steps; leave it to `measure_alone` if it does not fit; warn if it fails."""
        failure = self._try(trial, self._start)
        if failure is not None and failure.is_out_of_memory:
            self._too_large.append(trial)
        elif failure is not None:
            self._warn(
                f"The {trial.role} ({trial.title}) could not be measured next to the training: {failure.message}"
            )

    def close(self) -> None:
        """End the trials' turns."""
        self._kept.close()
        self.players.clear()

    def finish(self, slots: Mapping[str, Sequence[float]]) -> None:
        """Send the events of each trial, its result with these slots last."""
        size = self._training.experiment.train.global_batch_size
        for name, (later, result) in self._measured.items():
            rates = slots[name]
            self._send(
                later,
                result,
                slots=tuple(rates),
                **rates_over(rates, batch=size),
            )

    def measure_alone(self) -> None:
        """Measure the trials that did not fit next to the training, which loses its weights."""
        free_training(self._training)
        for trial in self._too_large:
            self._warn(
                f"The {trial.role} ({trial.title}) does not fit into memory next to the training. It is measured "
                "after the training has freed its memory. The speedup then has the range of its windows instead of an "
                "interval"
            )
            if (failure := self._try(self._with_windows(trial), self._measure)) is not None:
                self._warn(
                    f"The {trial.role} ({trial.title}) could not be measured, although the training was over: "
                    f"{failure.message}"
                )

    def _try(self, trial: Compared, measure: Callable[[Compared], None]) -> _Failure | None:
        """Measure a trial, in smaller micro-batches if memory runs out; return why its whole batch failed, if all do.

        A request to stop leaves the trial out: all ranks agree on it later.
        """
        failures: list[_Failure] = []
        for attempt in (trial, *_in_micro_batches(trial, training=self._training.trial)):
            torch.set_num_threads(trial.cpus_per_worker)
            try:
                measure(attempt)
            except Stopped:
                return None
            except Exception as error:  # noqa: BLE001 - the training is over, and other trials may do
                # As text: the error's traceback refers to the memory that the next attempt needs.
                _log.warning("%s could not be measured\n%s", trial.title, "".join(traceback.format_exception(error)))
                failures.append(_Failure(first_line(error), is_out_of_memory(error)))
            else:
                return None
            if not failures[-1].is_out_of_memory:
                break
        return failures[0]

    def _start(self, trial: Compared) -> None:
        """Build a trial, and take its first steps and its first slot."""
        with ExitStack() as kept:
            steps = find_first_steps(trial, step_s=self._expect_step_s(trial))
            context, measured = self._first_steps(trial.model_copy(update={"max_steps": steps}))
            player = Player(trial.name, context).start(kept)
            step_s = player.settle(measured.result.step_ms.median / 1000)
            check_free_memory(context.device, needed=self._needed)
            self._kept.push(kept.pop_all())
        self.players[trial.name], self.step_s[trial.name] = player, step_s
        self._measured[trial.name] = measured

    def _measure(self, trial: Compared) -> None:
        """Measure a trial in windows, and send its events."""
        _, measured = self._first_steps(trial)
        self._send(*measured, is_alone=True)

    def _first_steps(self, trial: Compared) -> tuple[TrainContext, _Measured]:
        later = _Later(self._outbox)
        mark(Phase.BUILDING)  # which may take any time; this rank's last phase may be a step's
        context = build(trial, rank=self._rank, datasets=self._training.batches.datasets)
        result = self._complete(context, later)
        parts = context.accumulation
        if parts != self._training.accumulation:
            result = result.model_copy(update={"micro_batches": parts})
        return context, _Measured(later, result)

    def _with_windows(self, trial: Compared) -> Compared:
        """Return a trial that has its usual windows, as far as the other ranks may wait for it."""
        measure, training = trial.experiment.benchmark, self._training.trial
        fitting = int(training.experiment.parallel.timeout_s / 2 / self._expect_step_s(trial))
        return trial.model_copy(update={"max_steps": max(trial.max_steps, min(measure.total_steps, fitting))})

    def _expect_step_s(self, trial: Trial) -> float:
        return expect_step_s(trial, training=self._training.trial, step_s=self.training_step_s)

    def _send(self, later: "_Later", result: TrialResult, **measured: Any) -> None:
        """Send a trial's events, its result last, with what was ``measured`` of it."""
        more = {**measured, "peak_memory_mb": ()}  # it would count two models and their data
        finished = Finished(trial=result.trial, result=result.model_copy(update=more))
        for event in (*later.events, finished):
            self._outbox.event(event)

    def _warn(self, message: str) -> None:
        self._outbox.event(Warned(trial=self._training.trial.name, message=message))


def _in_micro_batches(trial: Compared, *, training: Trial) -> tuple[Compared, ...]:
    """Return the trial with micro-batches of the size that each worker of a training has; none where it can't be."""
    experiment, train = trial.experiment, trial.experiment.train
    parts = train.gradient_accumulation * training.replicas // trial.replicas
    replays = trial.device == "cuda" and train.compile is not None and train.compile.has_cuda_graphs
    if parts <= train.gradient_accumulation or replays:
        return ()
    smaller = train.model_copy(update={"gradient_accumulation": parts})
    return (trial.model_copy(update={"experiment": experiment.model_copy(update={"train": smaller})}),)


class _Later:
    """Outbox that keeps a trial's events until it is known whether it could be measured; sends warnings at once."""

    def __init__(self, outbox: Outbox) -> None:
        self.events: list[AnyEvent] = []
        self._outbox = outbox

    @property
    def stop_asked(self) -> bool:
        return self._outbox.stop_asked

    def event(self, event: AnyEvent) -> None:
        if isinstance(event, Warned):
            self._outbox.event(event)
        elif event.kind in ("started", "metrics"):
            self.events.append(event)

    def file(self, path: Path, name: str) -> None:
        """Send nothing: a measurement has no files."""

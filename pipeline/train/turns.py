"""Slots of training that are measured in turn: the training and what it is compared with, on the same machine.

Baseline and training are alive at the same time and take short slots alternately (A B B A A B ...), so that whatever
else the machine does slows both. What runs in one process is built by rank 0 next to its part of the training; the
other ranks wait meanwhile, blocked. A trial that runs out of memory there is built again with smaller micro-batches.

See docs/design.md.
"""

import logging
import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pipeline.errors import Stopped
from pipeline.protocol import estimates
from pipeline.protocol.estimates import LEAST_PAIRS
from pipeline.protocol.events import AnyEvent, Finished, Outbox, Phase, Warned
from pipeline.protocol.progress import ProgressReporter
from pipeline.protocol.trial import Baseline, Rank, Reference, Training, Trial
from pipeline.protocol.trial_result import TrialResult
from pipeline.system import find_processor_s
from pipeline.train.build import build
from pipeline.train.errors import is_out_of_memory
from pipeline.train.kept import endless, suspend_updates
from pipeline.train.ranks import forget_memory, gather, synchronize
from pipeline.train.state import State
from pipeline.train.watch import mark, waiting
from pipeline.wording import first_line

SLOT_S = 0.75
"""Shortest slot in seconds: long for the clock, but no longer than the bursts of load that two neighbors share."""
LEAST_STEPS = 2
"""Fewest timed steps of the slowest trial in a slot: more slots give a narrower interval than longer ones."""
FEWEST_PAIRS = 2  # Fewest rounds, whatever they take: one has no interval
PATIENCE = 1.5  # Multiple of the budget that `LEAST_PAIRS` rounds may take, and beyond which no further round starts
_SETTLING_S = 0.2
_FIRST_STEPS, _FIRST_STEPS_S = 3, 10.0  # fewest, whose losses are compared, and seconds that more of them may take
_SHORTEST_S = 1e-5  # of a step, against a division by next to nothing
_OTHER_S = 2.0  # which the estimate leaves out: building the trials, counting operations, the end

_log = logging.getLogger(__name__)

Complete = Callable[[State], TrialResult]  # Runs a trial that is built and returns its result
Compared = Baseline | Reference


class Schedule(NamedTuple):
    """Number and lengths of the slots, fixed before the first one; a machine that slows down may end them early."""

    rounds: int  # Rounds in which each trial has one slot
    steps: Mapping[str, int]  # Timed steps in a slot of each trial, by its name
    seconds: float  # Expected duration of all slots
    limit_s: float  # Seconds beyond which no further round starts

    @classmethod
    def within(cls, step_s: Mapping[str, float], *, budget_s: float, most: int, queue: int) -> "Schedule":
        """Return the schedule that a budget for all slots allows, with at ``most`` so many rounds.

        A slot is twice as long as the batches last that a loader has ready, those of ``queue`` steps.
        """
        slot_s = max(SLOT_S, max(LEAST_STEPS, 2 * queue) * max(step_s.values()))
        steps = {name: math.ceil(slot_s / seconds) for name, seconds in step_s.items()}
        round_s = sum((steps[name] + 1) * seconds for name, seconds in step_s.items())
        least = max(FEWEST_PAIRS, min(LEAST_PAIRS, int(PATIENCE * budget_s / round_s)))
        rounds = max(least, min(most, int(budget_s / round_s)))
        return cls(rounds, steps, rounds * round_s, PATIENCE * budget_s)

    @classmethod
    def of(cls, trial: Trial, step_s: Mapping[str, float], *, passed_s: float) -> "Schedule":
        """Return the schedule of a training and its compared trials, after measurements that took ``passed_s``."""
        loader, measure = trial.experiment.loader, trial.experiment.benchmark
        ready = loader.num_workers * loader.prefetch_factor if loader.num_workers else 0
        queue = -(-ready // trial.experiment.train.gradient_accumulation)
        budget_s = min(measure.time_budget_s, max(measure.limit_s - passed_s, 0.0))
        return cls.within(step_s, budget_s=budget_s, most=measure.rounds, queue=queue)


def turns(names: Sequence[str], *, rounds: int, seed: int) -> list[tuple[str, ...]]:
    """Return the order of the slots in each round: the seed decides who begins, every other round is reversed."""
    first = seed % len(names)
    order = (*names[first:], *names[:first])
    return [order[:: -1 if index % 2 else 1] for index in range(rounds)]


def expect_step_s(trial: Trial, *, training: Trial, step_s: float) -> float:
    """Return the seconds of a trial's step from a training step's, if devices share the work evenly."""
    units = [one.replicas * (one.cpus_per_worker if one.device == "cpu" else 1) for one in (training, trial)]
    return step_s * units[0] / units[1]


def find_first_steps(trial: Compared, *, step_s: float) -> int:
    """Return the number of a trial's first steps: fewer if a step takes long, since the training waits for them."""
    return max(_FIRST_STEPS, min(trial.max_steps, int(_FIRST_STEPS_S / step_s)))


def estimate_seconds(trial: Training, *, step_s: float) -> float:
    """Return about how many seconds `measure_in_turn` takes after a training with steps of ``step_s`` seconds."""
    first_s, each_s = 0.0, {trial.name: step_s}
    for other in trial.compared_with:
        each_s[other.name] = own_s = expect_step_s(other, training=trial, step_s=step_s)
        first_s += own_s * (find_first_steps(other, step_s=own_s) + 2 * LEAST_STEPS)
    return first_s + Schedule.of(trial, each_s, passed_s=first_s).seconds + _OTHER_S


def over(slots: Sequence[float], *, batch: int) -> dict[str, Any]:
    """Return slots in samples per second, with their throughput and step time, by the names of `TrialResult`."""
    return {
        "slots": tuple(slots),
        "samples_per_second": estimates.geometric_spread(slots),
        "step_ms": estimates.spread([1000 * batch / rate for rate in slots]),
    }


def measure_in_turn(s: State, *, step_ms: float, since: float, complete: Complete) -> dict[str, Any]:
    """Measure the trials that a training is compared with, in turn with it, once it is over. Collective.

    Returns what the training's slots change in its result; nothing if no other trial could be measured. Rank 0 sends
    the events of the others, a `Finished` each included.
    """
    trial, rank = s.trial, s.rank
    assert isinstance(trial, Training)
    wait = _make_queue(rank, timeout_s=s.experiment.parallel.timeout_s)
    forget_memory(s.device)
    with ExitStack() as kept:
        main = Player(s, kept)
        main.settle(max(gather(step_ms / 1000, rank=rank)))  # all ranks need the same number of steps
        players = {trial.name: main}
        for other in trial.compared_with:
            if rank.is_first and (player := _try_to_build(other, main, complete=complete, kept=kept)):
                players[other.name] = player
            wait()  # after each, as no rank may wait longer than parallel.timeout_s
        _stop_if_asked(s)
        expected_s = {name: one.expected_s for name, one in players.items()}
        ranks = gather((expected_s, time.monotonic() - since), rank=rank)
        step_s = ranks[0][0] | {trial.name: max(own[trial.name] for own, _ in ranks)}
        if len(step_s) == 1:
            return {}
        schedule = Schedule.of(trial, step_s, passed_s=ranks[0][1])
        before, start, rounds = find_processor_s(), time.monotonic(), schedule.rounds
        with ProgressReporter("measuring the speedup", total=rounds, unit="rounds", silent=not rank.is_first) as shown:
            for index, order in enumerate(turns(list(step_s), rounds=rounds, seed=s.seed)):
                _stop_if_asked(s)
                passed_s = gather(time.monotonic() - start, rank=rank)[0]
                if index >= FEWEST_PAIRS and passed_s * (index + 1) / index > schedule.limit_s:
                    break  # a machine that slows down has fewer rounds, and a wider interval
                for name in order:
                    wait()
                    if name in players:
                        players[name].take(steps=schedule.steps[name])
                shown.by(1)
        slots_s = time.monotonic() - start
        mine_s, busy_s = (now - then for now, then in zip(find_processor_s(), before, strict=True))
        own_s = sum(seconds for node, seconds in gather((rank.node, mine_s), rank=rank) if node == rank.node)
        size, ranks_s = s.experiment.train.global_batch_size, gather(main.step_s, rank=rank)
        for player in players.values():
            if player.later is not None:
                player.later.finish(**over([size / seconds for seconds in player.step_s], batch=size))
    torch.set_num_threads(trial.cpus_per_worker)
    slots = [size / max(times) for times in zip(*ranks_s, strict=True)]
    return {**over(slots, batch=size), "slots_s": slots_s, "other_cores": max(0.0, busy_s - own_s) / slots_s}


def _stop_if_asked(s: State) -> None:
    if any(gather(s.outbox.stop_asked, rank=s.rank)):
        raise Stopped


def _make_queue(rank: Rank, *, timeout_s: float) -> Callable[[], None]:
    """Return a function that waits for all ranks, blocked in the operating system: NCCL's waiting would take a core."""
    needs_group = rank.world_size > 1 and dist.get_backend() != "gloo"
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)) if needs_group else None

    def wait() -> None:
        if rank.world_size > 1:
            with waiting():
                dist.barrier(group=group)

    return wait


class Player:
    """A trial that takes slots."""

    def __init__(self, s: State, kept: ExitStack, *, later: "_Later | None" = None) -> None:
        """Open the stream of batches; weights and buffers are kept until ``kept`` is closed."""
        self.s, self.later = s, later
        self.step_s: list[float] = []  # Seconds of a step in each slot
        self.expected_s = 0.0
        self.passing_bytes = 0  # Memory that a step needs besides what is in use between steps, on a GPU
        kept.enter_context(suspend_updates(s))
        self._stream = endless(s)

    def take(self, *, steps: int) -> None:
        """Take one slot; its first step isn't timed, as it finds the caches of another trial."""
        s = self.s
        torch.set_num_threads(s.trial.cpus_per_worker)
        s.train_step(s, self._stream, step=0)
        synchronize(s.device)
        start = time.perf_counter()
        for _ in range(steps):
            s.train_step(s, self._stream, step=0)
        synchronize(s.device)
        self.step_s.append((time.perf_counter() - start) / steps)

    def settle(self, step_s: float) -> None:
        """Start the loaders, warm the caches up, and find the seconds of a step: another number than the known one."""
        self.take(steps=max(LEAST_STEPS, math.ceil(_SETTLING_S / max(step_s, _SHORTEST_S))))
        self.expected_s = max(self.step_s.pop(), _SHORTEST_S)
        if self.s.device.type == "cuda":
            peak, used = torch.cuda.max_memory_allocated(self.s.device), torch.cuda.memory_allocated(self.s.device)
            self.passing_bytes = peak - used


@dataclass
class _Later:
    """Outbox that keeps a trial's events until it is known whether it could be measured; sends warnings at once."""

    outbox: Outbox
    events: list[AnyEvent] = field(default_factory=list)
    result: TrialResult | None = None

    @property
    def stop_asked(self) -> bool:
        return self.outbox.stop_asked

    def event(self, event: AnyEvent) -> None:
        if isinstance(event, Warned):
            self.outbox.event(event)
        elif event.kind in ("started", "metrics"):
            self.events.append(event)

    def file(self, path: Path, name: str) -> None:
        """Send nothing: a measurement has no files."""

    def finish(self, **measured: Any) -> None:
        """Send the events, and last the result with what was ``measured``."""
        assert self.result is not None
        result = self.result.model_copy(update={**measured, "peak_memory_mb": ()})  # which would count two models
        for event in (*self.events, Finished(trial=result.trial, result=result)):
            self.outbox.event(event)


def _try_to_build(trial: Compared, main: Player, *, complete: Complete, kept: ExitStack) -> Player | None:
    """Build a trial next to the training, in smaller micro-batches if memory runs out; None if that fails, too."""
    failures = []
    for attempt in (trial, *_split_micro_batches(trial, training=main.s.trial)):
        torch.set_num_threads(trial.cpus_per_worker)
        try:
            return _build(attempt, main, complete=complete, kept=kept)
        except Stopped:  # all ranks agree on it later
            return None
        except Exception as error:  # noqa: BLE001 - the training is over, and other trials may do
            # As text: the error's traceback refers to the memory that the next attempt needs.
            _log.warning("%s could not be measured\n%s", trial.title, "".join(traceback.format_exception(error)))
            has_no_memory = is_out_of_memory(error)
            alone = ". Measure it by itself: pipeline benchmark FILE" if has_no_memory else ""
            failures.append(f"{first_line(error)}{alone}")
            if not has_no_memory:
                break
    main.s.warn(f"The {trial.role} ({trial.title}) could not be measured next to the training: {failures[0]}")
    return None


def _build(trial: Compared, main: Player, *, complete: Complete, kept: ExitStack) -> Player:
    """Build a trial, and take its first steps and its first slot."""
    training = main.s
    steps = find_first_steps(trial, step_s=expect_step_s(trial, training=training.trial, step_s=main.expected_s))
    later = _Later(training.outbox)
    mark(Phase.BUILDING)  # which may take any time; this rank's last phase may be a step's
    s = build(
        trial.model_copy(update={"max_steps": steps}),
        rank=training.rank.model_copy(update={"world_size": 1, "local_world_size": 1}),
        outbox=later,
        datasets=training.batches.datasets,
    )
    later.result = result = complete(s)
    if s.accumulation != training.accumulation:
        later.result = result.model_copy(update={"micro_batches": s.accumulation})
    with ExitStack() as own:
        player = Player(s, own, later=later)
        player.settle(result.step_ms.median / 1000)
        check_free_memory(s.device, needed=main.passing_bytes)
        kept.push(own.pop_all())
    return player


def _split_micro_batches(trial: Compared, *, training: Trial) -> tuple[Compared, ...]:
    """Return the trial with micro-batches of the size that each worker of a training has; none where it can't be."""
    experiment, train = trial.experiment, trial.experiment.train
    parts = train.gradient_accumulation * training.replicas // trial.replicas
    replays = trial.device == "cuda" and train.compile is not None and train.compile.has_cuda_graphs
    if parts <= train.gradient_accumulation or replays:
        return ()
    smaller = train.model_copy(update={"gradient_accumulation": parts})
    return (trial.model_copy(update={"experiment": experiment.model_copy(update={"train": smaller})}),)


def check_free_memory(device: torch.device, *, needed: int) -> None:
    """Check that a GPU has memory for a training's next step, in which a rank that fails leaves the others waiting."""
    if device.type == "cpu":
        return
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if (free := torch.cuda.mem_get_info(device)[0] + cached) < needed:
        message = f"the next training step needs {needed / 2**20:,.0f} MiB, but {free / 2**20:,.0f} MiB are free"
        raise torch.OutOfMemoryError(message)

"""Slots of training that are measured in turn: the training and what it is compared with, on the same machine.

Baseline and training are alive at the same time and take short slots alternately (A B B A A B ...), so that whatever
else the machine does slows both. What runs in one process is built by rank 0 next to its part of the training, see
`pipeline.training.measuring.compared_trials`; the other ranks wait meanwhile, blocked. This module is apart from
`pipeline.training.measuring.probe`, which takes a step apart.

See docs/decisions/0019-speedups-in-turn.md.
"""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from pipeline.config.benchmark_section import Benchmark
from pipeline.config.loader_section import Loader
from pipeline.errors import Stopped
from pipeline.protocol.estimates import LEAST_PAIRS
from pipeline.protocol.events import Outbox, Warned
from pipeline.protocol.progress import ProgressReporter
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import Training, Trial
from pipeline.system.other_load import OtherLoad
from pipeline.training.context import TrainContext
from pipeline.training.measuring.compared_trials import (
    LEAST_STEPS,
    ComparedTrials,
    Complete,
    Player,
    expect_step_s,
    find_first_steps,
)
from pipeline.training.ranks.collectives import gather
from pipeline.training.ranks.rank_gpus import forget_memory
from pipeline.training.ranks.watch import waiting
from pipeline.wording import duration

SLOT_S = 0.75
"""Shortest slot in seconds: long for the clock, but no longer than the bursts of load that two neighbors share."""
FEWEST_PAIRS = 2
"""Fewest rounds, whatever they take: one has no interval. Within `PATIENCE` times the budget, there are at least
`LEAST_PAIRS`."""
PATIENCE = 1.5
"""Multiple of the budget beyond which no further round starts."""
_OTHER_S = 2.0
"""Seconds for what the estimate of the measurements leaves out: building the trials, counting operations, the end."""


class InTurn(NamedTuple):
    """The slots of a training."""

    slots: tuple[float, ...]
    """Samples per second in each."""
    slots_s: float
    """Seconds that all slots took."""
    other_cores: float
    """Cores of this rank's machine that other processes used meanwhile."""


class Schedule(NamedTuple):
    """Number and lengths of the slots, fixed before the first one; a machine that slows down may end them early."""

    rounds: int
    """Rounds in which each trial has one slot."""
    steps: Mapping[str, int]
    """Timed steps in a slot of each trial, by its name."""
    slot_s: Mapping[str, float]
    """Expected duration of a slot of each trial."""
    seconds: float
    """Expected duration of all slots."""

    @classmethod
    def within(cls, step_s: Mapping[str, float], *, budget_s: float, most: int, queue: int) -> "Schedule":
        """Return the schedule that the budget allows.

        A slot is twice as long as the batches last that a loader has ready, so that it sees the loader's own pace.

        Args:
            step_s: seconds of a step of each trial.
            budget_s: seconds for all slots.
            most: most rounds.
            queue: steps whose batches a loader may have ready.
        """
        slot_s = max(SLOT_S, max(LEAST_STEPS, 2 * queue) * max(step_s.values()))
        steps = {name: math.ceil(slot_s / seconds) for name, seconds in step_s.items()}
        round_s = sum((steps[name] + 1) * seconds for name, seconds in step_s.items())
        least = max(FEWEST_PAIRS, min(LEAST_PAIRS, int(PATIENCE * budget_s / round_s)))
        rounds = max(least, min(most, int(budget_s / round_s)))
        slots = {name: steps[name] * seconds for name, seconds in step_s.items()}
        return cls(rounds, steps, slots, rounds * round_s)


def estimate_seconds(trial: Training, *, step_s: float) -> float:
    """Return about how long `measure_in_turn` takes after a training with steps of ``step_s`` seconds."""
    others = {each.name: expect_step_s(each, training=trial, step_s=step_s) for each in trial.compared_with}
    first_s = sum(
        others[each.name] * (find_first_steps(each, step_s=others[each.name]) + 2 * LEAST_STEPS)
        for each in trial.compared_with
    )
    budget_s = _find_budget_s(trial.experiment.benchmark, passed_s=first_s)
    return first_s + _schedule(trial, {trial.name: step_s, **others}, budget_s=budget_s).seconds + _OTHER_S


def turns(names: Sequence[str], *, rounds: int, seed: int) -> list[tuple[str, ...]]:
    """Return the order of the slots in each round: the seed decides who begins, every other round is reversed."""
    first = seed % len(names)
    order = (*names[first:], *names[:first])
    return [order[:: -1 if index % 2 else 1] for index in range(rounds)]


def measure_in_turn(
    context: TrainContext, *, step_ms: float, since: float, outbox: Outbox, complete: Complete
) -> "InTurn | None":
    """Measure the trials that a training is compared with, in turn with it. Collective.

    Rank 0 sends their events, a `Finished` each included. Weights and buffers of the training don't change, but rank 0
    frees them if another trial does not fit into memory next to them. So nothing may use the model afterwards.

    Args:
        context: the training, which is over.
        step_ms: milliseconds of a step of the training on this rank.
        since: `time.monotonic` of the first measurement after the training.
        outbox: channel to the driver.
        complete: runs such a trial's first steps, which have the losses to compare.

    Returns:
        The training's slots; None if no other trial could be measured in turn.

    Raises:
        Stopped: the driver asked for it.
    """
    trial, rank = context.trial, context.rank
    queue = _Queue(rank, timeout_s=trial.experiment.parallel.timeout_s)
    forget_memory(context.device)
    with ExitStack() as kept:
        main = Player(trial.name, context).start(kept)
        longest_s = max(gather(step_ms / 1000, rank=rank))  # all ranks need the same number of steps
        others = ComparedTrials(context, step_s=main.settle(longest_s), outbox=outbox, complete=complete)
        kept.callback(others.close)
        found = _in_turn(main, others, queue=queue, since=since, outbox=outbox)
    del main  # its stream holds batches
    torch.set_num_threads(trial.cpus_per_worker)
    if gather(others.has_too_large, rank=rank)[0]:
        if rank.is_first:
            others.measure_alone()
            torch.set_num_threads(trial.cpus_per_worker)
        queue.wait()
        _stop_if_asked(outbox, rank=rank)
    return found


def _in_turn(main: Player, others: ComparedTrials, *, queue: "_Queue", since: float, outbox: Outbox) -> InTurn | None:
    """Build the other trials, let all take their slots, and send the results of the others. Collective."""
    assert main.context is not None
    context, trial, rank = main.context, main.context.trial, main.context.rank
    assert isinstance(trial, Training)
    for other in trial.compared_with:
        if rank.is_first:
            others.build(other)
        queue.wait()  # after each, as no rank may wait longer than parallel.timeout_s
    _stop_if_asked(outbox, rank=rank)
    ranks = gather((others.training_step_s, others.step_s), rank=rank)
    step_s = {trial.name: max(own for own, _ in ranks), **ranks[0][1]}
    if len(step_s) == 1:
        return None
    players = {name: others.players.get(name, Player(name)) for name in step_s} | {main.name: main}
    passed_s = gather(time.monotonic() - since, rank=rank)[0]
    budget_s = _find_budget_s(context.experiment.benchmark, passed_s=passed_s)
    schedule = _schedule(trial, step_s, budget_s=budget_s)
    if rank.is_first and schedule.seconds > PATIENCE * context.experiment.benchmark.time_budget_s:
        outbox.event(Warned(trial=trial.name, message=_format_overrun(schedule)))
    load = OtherLoad()
    _play(players, schedule, context=context, limit_s=PATIENCE * budget_s, queue=queue, outbox=outbox)
    slots_s, other_cores = load.seconds, _other_cores(load, rank=rank)
    slowest = [max(times) for times in zip(*gather(main.step_s, rank=rank), strict=True)]
    size = context.experiment.train.global_batch_size
    if rank.is_first:
        others.finish({name: [size / seconds for seconds in players[name].step_s] for name in players})
    return InTurn(tuple(size / seconds for seconds in slowest), slots_s, other_cores)


def _find_budget_s(measure: Benchmark, *, passed_s: float) -> float:
    """Return the seconds for all slots, where the measurements before them took ``passed_s``."""
    return min(measure.time_budget_s, max(measure.limit_s - passed_s, 0.0))


def _schedule(trial: Trial, step_s: Mapping[str, float], *, budget_s: float) -> Schedule:
    """Return the schedule of the slots of a training and of what it is compared with."""
    queue = -(-_ready(trial.experiment.loader) // trial.experiment.train.gradient_accumulation)
    return Schedule.within(step_s, budget_s=budget_s, most=trial.experiment.benchmark.rounds, queue=queue)


def _format_overrun(schedule: Schedule) -> str:
    return (
        f"measuring the speedup takes about {duration(schedule.seconds)}, longer than benchmark.time_budget_s, because "
        f"steps are long. There are {schedule.rounds} rounds. To save this time, use --no-baseline"
    )


def _stop_if_asked(outbox: Outbox, *, rank: Rank) -> None:
    """Raise Stopped on all ranks if the driver has asked any of them to stop. Collective."""
    if any(gather(outbox.stop_asked, rank=rank)):
        raise Stopped


def _play(
    players: Mapping[str, Player],
    schedule: Schedule,
    *,
    context: TrainContext,
    limit_s: float,
    queue: "_Queue",
    outbox: Outbox,
) -> None:
    """Let each player take its slots, until the next round would take too long.

    Raises:
        Stopped: the driver asked for it.
    """
    rank, begun = context.rank, time.monotonic()
    rounds = turns(list(players), rounds=schedule.rounds, seed=context.experiment.seed)
    with ProgressReporter(
        "measuring the speedup", total=schedule.rounds, unit="rounds", silent=not rank.is_first
    ) as told:
        for index, order in enumerate(rounds):
            _stop_if_asked(outbox, rank=rank)
            passed_s = gather(time.monotonic() - begun, rank=rank)[0]
            if index >= FEWEST_PAIRS and passed_s * (index + 1) / index > limit_s:
                if rank.is_first:
                    outbox.event(Warned(trial=context.trial.name, message=_ended_early(index, passed_s, schedule)))
                break
            for name in order:
                queue.wait()
                players[name].take(steps=schedule.steps[name], planned_s=schedule.slot_s[name])
            told.by(1)


def _ended_early(pairs: int, seconds: float, schedule: Schedule) -> str:
    return (
        f"stopped the speedup measurement after {pairs} of {schedule.rounds} rounds: another round would take "
        f"too long ({duration(seconds)} so far, {duration(schedule.seconds)} planned for all). The confidence interval "
        "is wider than planned"
    )


def _other_cores(load: OtherLoad, *, rank: Rank) -> float:
    """Return the cores of this rank's machine that other processes than the ranks have used. Collective."""
    own_s = sum(seconds for node, seconds in gather((rank.node, load.own_s), rank=rank) if node == rank.node)
    return max(0.0, load.busy_s - own_s) / load.seconds


def _ready(loader: Loader) -> int:
    """Return how many batches of a loader may be ready: those that its processes have fetched ahead."""
    return loader.num_workers * loader.prefetch_factor if loader.num_workers else 0


class _Queue:
    """Line in which ranks wait for each other, blocked in the operating system: NCCL's waiting would take a core."""

    def __init__(self, rank: Rank, *, timeout_s: float) -> None:
        self._rank = rank
        needs_group = rank.world_size > 1 and dist.get_backend() != "gloo"
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)) if needs_group else None

    def wait(self) -> None:
        """Wait for all ranks."""
        if self._rank.world_size > 1:
            with waiting():
                dist.barrier(group=self._group)

"""Slots of training that are measured in turn: the training and what it is compared with, on the same machine.

Baseline and training are alive at the same time and take short slots alternately (A B B A A B ...), so that whatever
else the machine does slows both. What runs in one process is built by rank 0 next to its part of the training; the
other ranks wait meanwhile, blocked. A trial that runs out of memory there is built again with smaller micro-batches. If
memory still runs out, it is measured by itself, once the training has freed its memory: a process of its own would have
no more memory, and outer launchers can't start one.

See docs/decisions/0019-speedups-in-turn.md.
"""

import logging
import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from pipeline.errors import Stopped
from pipeline.protocol import estimates
from pipeline.protocol.estimates import LEAST_PAIRS
from pipeline.protocol.events import AnyEvent, Finished, Outbox, Phase, Warned
from pipeline.protocol.progress import ProgressReporter
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import Baseline, Reference, Training, Trial
from pipeline.protocol.trial_result import TrialResult
from pipeline.system.process import OtherLoad
from pipeline.train.build import build
from pipeline.train.errors import is_out_of_memory
from pipeline.train.kept import clear_gradients, endless, suspend_updates
from pipeline.train.ranks import forget_memory, gather, synchronize
from pipeline.train.state import State
from pipeline.train.watch import mark, waiting
from pipeline.wording import duration, first_line

SLOT_S = 0.75
"""Shortest slot in seconds: long for the clock, but no longer than the bursts of load that two neighbors share."""
LEAST_STEPS = 2
"""Fewest timed steps of the slowest trial in a slot: more slots give a narrower interval than longer ones."""
FEWEST_PAIRS = 2
"""Fewest rounds, whatever they take: one has no interval. Within `PATIENCE` times the budget, there are at least
`LEAST_PAIRS`."""
PATIENCE = 1.5
"""Multiple of the budget, see `Schedule.limit_s`."""
_SETTLING_S = 0.2
_MOST_TIMES = 2.0  # the planned time, after which a slot ends early, with fewer steps: a machine may get busy
_FIRST_STEPS, _FIRST_STEPS_S = 3, 10.0  # fewest, whose losses are compared, and seconds that more of them may take
_SHORTEST_S = 1e-5  # of a step, against a division by next to nothing
_OTHER_S = 2.0  # which the estimate leaves out: building the trials, counting operations, the end

_log = logging.getLogger(__name__)

Complete = Callable[[State], TrialResult]
"""Runs a trial that is built and returns its result."""
Compared = Baseline | Reference


class Schedule(NamedTuple):
    """Number and lengths of the slots, fixed before the first one; a machine that slows down may end them early."""

    rounds: int
    """Rounds in which each trial has one slot."""
    steps: Mapping[str, int]
    """Timed steps in a slot of each trial, by its name."""
    slot_s: Mapping[str, float]
    """Expected duration of a slot of each trial, as ``seconds`` is of all slots."""
    seconds: float
    limit_s: float
    """Seconds beyond which no further round starts."""

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
        slots = {name: steps[name] * seconds for name, seconds in step_s.items()}
        return cls(rounds, steps, slots, rounds * round_s, PATIENCE * budget_s)

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

    Returns what the training's slots change in its result; nothing if no other trial could be measured in turn. Rank 0
    sends the events of the others, a `Finished` each included. Weights and buffers of the training don't change, but
    rank 0 frees them if another trial does not fit into memory next to them: nothing may use the model afterwards.

    Args:
        s: the training, which is over.
        step_ms: milliseconds of a step of the training on this rank.
        since: `time.monotonic` of the first measurement after the training.
        complete: runs such a trial's first steps, which have the losses to compare.

    Raises:
        Stopped: the driver asked for it.
    """
    wait = _make_queue(s.rank, timeout_s=s.experiment.parallel.timeout_s)
    forget_memory(s.device)
    with ExitStack() as kept:
        main = Player(s.trial.name, s, kept=kept)
        main.settle(max(gather(step_ms / 1000, rank=s.rank)))  # all ranks need the same number of steps
        others = ComparedTrials(s, step_s=main.expected_s, complete=complete, kept=kept)
        found = _measure_in_turn(s, main, others, wait=wait, since=since)
    del main  # its stream holds batches
    others.players.clear()
    torch.set_num_threads(s.trial.cpus_per_worker)
    if gather(bool(others.too_large), rank=s.rank)[0]:
        if s.rank.is_first:
            others.measure_alone()
            torch.set_num_threads(s.trial.cpus_per_worker)
        wait()
        _stop_if_asked(s)
    return found


def _measure_in_turn(
    s: State, main: "Player", others: "ComparedTrials", *, wait: Callable[[], None], since: float
) -> dict[str, Any]:
    """Build the other trials, let all take their slots, and send the results of the others. Collective."""
    trial, rank = s.trial, s.rank
    assert isinstance(trial, Training)
    for other in trial.compared_with:
        if rank.is_first:
            others.build(other)
        wait()  # after each, as no rank may wait longer than parallel.timeout_s
    _stop_if_asked(s)
    known = {name: one.expected_s for name, one in others.players.items()}
    ranks = gather((main.expected_s, known, time.monotonic() - since), rank=rank)
    step_s = {trial.name: max(own for own, _, _ in ranks), **ranks[0][1]}
    if len(step_s) == 1:
        return {}
    players = {name: others.players.get(name, Player(name)) for name in step_s} | {main.name: main}
    schedule = Schedule.of(trial, step_s, passed_s=ranks[0][2])
    if schedule.seconds > PATIENCE * s.experiment.benchmark.time_budget_s:
        s.warn(
            f"measuring the speedup takes about {duration(schedule.seconds)}, longer than benchmark.time_budget_s, "
            f"because steps are long. There are {schedule.rounds} rounds. To save this time, use --no-baseline"
        )
    load, start, planned = OtherLoad(), time.monotonic(), schedule.rounds
    with ProgressReporter("measuring the speedup", total=planned, unit="rounds", silent=not rank.is_first) as progress:
        for index, order in enumerate(turns(list(players), rounds=planned, seed=s.seed)):
            _stop_if_asked(s)
            passed_s = gather(time.monotonic() - start, rank=rank)[0]
            if index >= FEWEST_PAIRS and passed_s * (index + 1) / index > schedule.limit_s:
                s.warn(
                    f"stopped the speedup measurement after {index} of {planned} rounds: another round would take too "
                    f"long ({duration(passed_s)} so far, {duration(schedule.seconds)} planned for all). The confidence "
                    "interval is wider than planned"
                )
                break
            for name in order:
                wait()
                players[name].take(steps=schedule.steps[name], planned_s=schedule.slot_s[name])
            progress.by(1)
    slots_s = load.seconds
    own_s = sum(seconds for node, seconds in gather((rank.node, load.own_s), rank=rank) if node == rank.node)
    other_cores = max(0.0, load.busy_s - own_s) / load.seconds
    size, ranks_s = s.experiment.train.global_batch_size, gather(main.step_s, rank=rank)
    for name, later in others.measured.items():
        later.finish(**over([size / seconds for seconds in others.players[name].step_s], batch=size))
    slots = [size / max(times) for times in zip(*ranks_s, strict=True)]
    return {**over(slots, batch=size), "slots_s": slots_s, "other_cores": other_cores}


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
    """A trial that takes slots; ``s`` is None on ranks that only wait for it."""

    def __init__(self, name: str, s: State | None = None, *, kept: ExitStack | None = None) -> None:
        """Open the stream of batches; weights and buffers are kept until ``kept`` is closed."""
        self.name, self._s = name, s
        self.step_s: list[float] = []
        """Seconds of a step in each slot."""
        self.expected_s = 0.0
        """Seconds of a step, as `settle` found it."""
        if s is not None and kept is not None:
            kept.enter_context(suspend_updates(s))
            self._stream: Iterator[Any] = endless(s)

    def take(self, *, steps: int, planned_s: float = math.inf) -> None:
        """Take one slot; its first step isn't timed, as it finds the caches of another trial."""
        if (s := self._s) is None:
            return
        torch.set_num_threads(s.trial.cpus_per_worker)
        s.train_step(s, self._stream, step=0)
        synchronize(s.device)
        # Others wait for a single process, whose slot ends once it takes far longer than planned.
        limit_s = math.inf if s.rank.world_size > 1 else _MOST_TIMES * planned_s
        start, done = time.perf_counter(), 0
        while done < LEAST_STEPS or (done < steps and time.perf_counter() - start < limit_s):
            s.train_step(s, self._stream, step=0)
            done += 1
        synchronize(s.device)
        self.step_s.append((time.perf_counter() - start) / done)

    def settle(self, step_s: float) -> None:
        """Start the loaders, warm the caches up, and find the seconds of a step: another number than the known one."""
        steps = max(LEAST_STEPS, math.ceil(_SETTLING_S / max(step_s, _SHORTEST_S)))
        self.take(steps=steps, planned_s=2 * _SETTLING_S)
        self.expected_s = max(self.step_s.pop(), _SHORTEST_S)


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


class ComparedTrials:
    """The trials on rank 0 that a training is compared with; on other ranks there are none."""

    def __init__(self, training: State, *, step_s: float, complete: Complete, kept: ExitStack) -> None:
        """Prepare to build trials next to a training with steps of ``step_s``; ``kept`` is closed after all turns."""
        self.players: dict[str, Player] = {}
        """Trials that have taken their first steps, by name."""
        self.measured: dict[str, _Later] = {}
        """Their events."""
        self.too_large: list[Compared] = []
        """Trials for `measure_alone`."""
        self._training, self._step_s, self._complete, self._kept = training, step_s, complete, kept
        self._rank = training.rank.model_copy(update={"world_size": 1, "local_world_size": 1})
        self._passing_bytes = 0
        if (device := training.device).type == "cuda":  # what a step needs besides what is in use now
            self._passing_bytes = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)

    def build(self, trial: Compared) -> None:
        """Build a trial and take its first steps; leave it to `measure_alone` if it does not fit; warn if it fails."""
        failure, is_too_large = self._try(trial, self._start)
        if is_too_large:
            self.too_large.append(trial)
        elif failure:
            self._training.warn(
                f"The {trial.role} ({trial.title}) could not be measured next to the training: {failure}"
            )

    def measure_alone(self) -> None:
        """Measure the trials that did not fit next to the training, which loses its weights."""
        training = self._training
        free_training(training)

        def measure(attempt: Compared) -> None:
            self._first_steps(attempt)[1].finish(is_alone=True)

        for trial in self.too_large:
            what = f"The {trial.role} ({trial.title})"
            training.warn(
                f"{what} does not fit into memory next to the training. It is measured after the training has freed "
                "its memory. The speedup then has the range of its windows instead of an interval"
            )
            # It has its usual windows, as far as the other ranks may wait for it.
            fitting = int(training.experiment.parallel.timeout_s / 2 / self._estimate_seconds(trial))
            most = max(trial.max_steps, min(trial.experiment.benchmark.total_steps, fitting))
            failure, _ = self._try(trial.model_copy(update={"max_steps": most}), measure)
            if failure:
                training.warn(f"{what} could not be measured, although the training was over: {failure}")

    def _try(self, trial: Compared, measure: Callable[[Compared], None]) -> tuple[str, bool]:
        """Measure a trial, in smaller micro-batches if memory runs out.

        Return why its whole batch failed, if all do, and whether for lack of memory.
        """
        failures: list[tuple[str, bool]] = []
        for attempt in (trial, *_split_micro_batches(trial, training=self._training.trial)):
            torch.set_num_threads(trial.cpus_per_worker)
            try:
                measure(attempt)
            except Stopped:  # all ranks agree on it later
                return "", False
            except Exception as error:  # noqa: BLE001 - the training is over, and other trials may do
                # As text: the error's traceback refers to the memory that the next attempt needs.
                _log.warning("%s could not be measured\n%s", trial.title, "".join(traceback.format_exception(error)))
                failures.append((first_line(error), is_out_of_memory(error)))
            else:
                return "", False
            if not failures[-1][1]:
                break
        return failures[0]

    def _start(self, trial: Compared) -> None:
        """Build a trial, and take its first steps and its first slot."""
        with ExitStack() as kept:
            steps = find_first_steps(trial, step_s=self._estimate_seconds(trial))
            s, later, step_s = self._first_steps(trial.model_copy(update={"max_steps": steps}))
            player = Player(trial.name, s, kept=kept)
            player.settle(step_s)
            check_free_memory(s.device, needed=self._passing_bytes)
            self._kept.push(kept.pop_all())
        self.players[trial.name], self.measured[trial.name] = player, later

    def _first_steps(self, trial: Compared) -> tuple[State, _Later, float]:
        """Run a trial, and return it with its events, which have its result, and the seconds of a step."""
        later = _Later(self._training.outbox)
        mark(Phase.BUILDING)  # which may take any time; this rank's last phase may be a step's
        s = build(trial, rank=self._rank, outbox=later, datasets=self._training.batches.datasets)
        result = self._complete(s)
        if s.accumulation != self._training.accumulation:
            result = result.model_copy(update={"micro_batches": s.accumulation})
        later.result = result
        return s, later, result.step_ms.median / 1000

    def _estimate_seconds(self, trial: Trial) -> float:
        return expect_step_s(trial, training=self._training.trial, step_s=self._step_s)


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
    """Check that a GPU has memory for a training's next step, in which a rank that fails leaves the others waiting.

    Raises:
        torch.OutOfMemoryError: it has less than ``needed`` bytes.
    """
    if device.type == "cpu":
        return
    reserved = torch.cuda.memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    # The driver does not know the limit that a process has set itself.
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total) - reserved
    if (free := min(free, allowed) + reserved - torch.cuda.memory_allocated(device)) < needed:
        message = f"the next training step needs {needed / 2**20:,.0f} MiB, but {free / 2**20:,.0f} MiB are free"
        raise torch.OutOfMemoryError(message)


def free_training(s: State) -> None:
    """Free weights, gradients, averages and optimizer state of a training that takes no further step.

    Shards stay: torch keeps references to them. Buffers and frozen weights are taken out of the model, not emptied:
    user code may share them, such as a constant or a cached teacher that the next model gets.
    """
    clear_gradients(s)
    for optimizer in s.optimizers.values():
        optimizer.state.clear()
    s.hooks, s.wrapped = (), s.trainee  # averages of the weights, and DDP's buckets of gradients
    s.outputs.clear()
    for module in s.trainee.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.new_empty(0)
        for name, parameter in module._parameters.items():
            if parameter is None or hasattr(parameter, "device_mesh"):
                continue
            if parameter.requires_grad:
                parameter.data = parameter.new_empty(0)
            else:
                module._parameters[name] = nn.Parameter(parameter.new_empty(0), requires_grad=False)
    if s.compiling is not None:
        torch._dynamo.reset()  # CUDA graphs keep memory
    forget_memory(s.device)

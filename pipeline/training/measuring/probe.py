"""The probe: time of a step in computing, waiting for gradients of other ranks, waiting for data, and the rest.

The wait for data is timed during training, since loader processes that fetch ahead make it depend on earlier steps.
The other parts are measured afterwards by leaving them out, since a profiler would change them: steps with gradient
exchange against steps without, steps with the optimizer against steps without, alternately (A B C A B C ...), so that
drift affects all equally, on a batch in memory. The learning rate is zero, and buffers are restored, so the model
doesn't change. `record_trace` records a few more steps with torch's profiler. `Afterwards` runs such measurements,
which may fail without losing the training's result.
"""

import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeVar

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from pipeline.errors import ExperimentError, Stopped
from pipeline.protocol import estimates
from pipeline.protocol.events import ArtifactSaved, Outbox, Trained, Warned
from pipeline.protocol.progress import ProgressReporter
from pipeline.protocol.trial import Baseline, Reference, Training, Trial
from pipeline.protocol.trial_result import Spread, StepParts, TrialResult
from pipeline.training.batches.rank_batches import MicroBatches
from pipeline.training.context import TrainContext
from pipeline.training.meters.clock import Lap, synchronize
from pipeline.training.model.synced_norms import SyncedNorms
from pipeline.training.ranks.collectives import barrier, gather
from pipeline.training.step import compute_gradients, train_step
from pipeline.training.step.dry_run import HeldStep, endless, forget_local_steps, held_step, without_updates
from pipeline.wording import first_line

T = TypeVar("T")
_log = logging.getLogger(__name__)

ROUNDS = 7
SLOT_SECONDS = 0.2  # long enough for the clock
BUDGET_SHARE = 0.1  # of a training's time; long steps are measured in fewer rounds
BUDGET_SECONDS = (1.0, 8.0)  # least and most
BUDGET_OF_MEASUREMENT_SECONDS = 4.0  # a measurement is shorter than a training itself
FEWEST_ROUNDS = 3
TRACED_STEPS = 3
_AGREEMENT_S = 10.0
"""Seconds in which all ranks fail if the failure is common, such as too little memory."""
_POLL_S = 0.1
_SETTLING_STEPS = 2  # which absorb the profiler's start and what the measurement before has left running

Times = dict[str, list[float]]
"""Milliseconds of a step by variant, a list with a value for each round."""


class Afterwards:
    """A series of collective measurements, which ends at the first failure on this rank.

    A rank that fails skips the remaining measurements and ends with the training's result. With gloo the other ranks
    find its connections closed and do the same. A kernel of NCCL would wait on: there, unless all ranks fail, the rank
    ends with its error. The driver, which has the result by then, ends the others.
    """

    def __init__(
        self, context: TrainContext, result: TrialResult, *, estimate_s: float | None = None, outbox: Outbox
    ) -> None:
        self._context, self._outbox = context, outbox
        self._failed = False
        if context.rank.is_first:
            trial = context.trial
            is_measured = not (isinstance(trial, Training) and trial.train_only)
            trained = Trained(trial=trial.name, result=result, is_measured=is_measured, measuring_s=estimate_s)
            outbox.event(trained)

    def measure(self, what: str, measurement: Callable[[], T]) -> T | None:
        """Return a collective measurement's result; None, with a warning that names it, if it fails.

        Raises:
            ExperimentError: the experiment doesn't allow this measurement, on any rank.
            Stopped: the driver asked for it.
            Exception: the measurement's own error, while other ranks wait for this one in a kernel.
        """
        if self._failed:
            return None
        try:
            return measurement()
        except (ExperimentError, Stopped):
            raise
        except Exception as error:  # no error may cost the result of the training
            if not self._can_continue(what):
                raise
            _log.warning("%s could not be measured", what, exc_info=error)
            rank = self._context.rank
            where = f" on {rank.place}" if rank.world_size > 1 else ""
            message = f"{what} could not be measured{where}, the training is not affected: {first_line(error)}"
            self._outbox.event(
                Warned(time=time.time(), trial=self._context.trial.name, message=message, subject="measuring")
            )
            self._failed = rank.world_size > 1
            return None

    def _can_continue(self, what: str) -> bool:
        """Return True if no other rank waits for this one, which has failed."""
        world_size = self._context.rank.world_size
        if world_size == 1 or dist.get_backend() == "gloo":
            return True
        store, key = dist.distributed_c10d._get_default_store(), f"{self._context.trial.name}: {what} failed"
        deadline = time.monotonic() + _AGREEMENT_S
        failed: int = store.add(key, 1)
        while failed < world_size and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            failed = store.add(key, 0)
        return failed == world_size


def waits(context: TrainContext, *, laps: Sequence[Lap]) -> StepParts:
    """Return the wait for data, timed during the steady laps of the training. Collective."""
    return StepParts(
        data_wait_ms=median(lap.data_wait_ms for lap in laps),
        nodes=tuple(gather(context.rank.node, rank=context.rank)),
    )


def probe(context: TrainContext, *, laps: Sequence[Lap], known: StepParts) -> StepParts:
    """Measure all parts of a step, after a training with these steady laps, and add those ``known``. Collective."""
    step_ms = max(gather(laps[0].step_ms, rank=context.rank))  # all ranks need the same number of steps
    with without_updates(context):
        times = _measure(context, step_ms=step_ms)
    wait_ms = median(lap.own_wait_ms for lap in laps)
    ranks = gather((times, wait_ms), rank=context.rank)
    paces = tuple(_later(estimates.spread(times["computed"], keeps_values=True), by=wait) for times, wait in ranks)
    return _parts([times for times, _ in ranks], paces=paces, known=known)


def _measure(context: TrainContext, *, step_ms: float) -> Times:
    held, synced = held_step(context), SyncedNorms(context.wrapped)

    def compute() -> None:
        with synced.alone():
            _without_optimizer(context, iter(held), exchanges=False)

    variants: dict[str, Callable[[], object]] = {
        "computed": compute,
        "whole": lambda: train_step(context, iter(held), step=0),
    }
    if context.rank.world_size > 1:
        variants["exchanged"] = lambda: _without_optimizer(context, iter(held), exchanges=True)
    times: Times = {name: [] for name in variants}
    rounds, steps, _ = plan_rounds(
        context.trial, variants=len(variants), step_s=step_ms / 1000, total_steps=context.steps
    )
    whose = f" of the {context.trial.role}" if isinstance(context.trial, Baseline | Reference) else ""
    with ProgressReporter(
        f"measuring the step time{whose}", total=rounds, unit="rounds", silent=not context.rank.is_first
    ) as told:
        for done in range(rounds):
            for name, step in variants.items():
                times[name].append(_slot(context, step, steps=steps))
                if name == "computed":
                    forget_local_steps(context, held)
            told.to(done + 1)
    return times


class Rounds(NamedTuple):
    """Rounds in which the parts of a step are measured."""

    rounds: int
    steps: int
    """Timed steps of each variant in a round."""
    seconds: float
    """Expected duration of all rounds."""


def plan_rounds(trial: Trial, *, variants: int, step_s: float, total_steps: int) -> Rounds:
    """Plan the measurement of a step's parts after a trial of ``total_steps`` steps of ``step_s`` seconds."""
    budget_s = BUDGET_OF_MEASUREMENT_SECONDS
    if isinstance(trial, Training):
        least, most = BUDGET_SECONDS
        budget_s = min(most, max(least, BUDGET_SHARE * total_steps * step_s))
    steps = max(1, min(10, int(SLOT_SECONDS / step_s)))
    round_s = variants * (steps + 1) * step_s
    rounds = max(FEWEST_ROUNDS, min(ROUNDS, int(budget_s / round_s)))
    return Rounds(rounds, steps, rounds * round_s)


def _parts(ranks: list[Times], *, paces: tuple[Spread, ...], known: StepParts) -> StepParts:
    """Combine all ranks' times into parts of a step; ranks wait for each other, so the slowest rank's time counts."""
    slowest = {name: [max(times) for times in zip(*(rank[name] for rank in ranks), strict=True)] for name in ranks[0]}
    exchanged = slowest.get("exchanged")
    return known.model_copy(
        update={
            "held_ms": estimates.spread(slowest["whole"]),
            "compute_ms": median(slowest["computed"]),
            "exposed_communication_ms": _excess(exchanged, slowest["computed"]) if exchanged else None,
            "rest_ms": _excess(slowest["whole"], exchanged or slowest["computed"]),
            "ranks": paces,
        }
    )


def _later(pace: Spread, *, by: float) -> Spread:
    return estimates.spread([value + by for value in pace.values], keeps_values=True)


def _excess(longer: list[float], shorter: list[float]) -> float:
    """Return the median of the differences in each round, at least 0: a negative one is noise."""
    return max(0.0, median(a - b for a, b in zip(longer, shorter, strict=True)))


def _slot(context: TrainContext, step: Callable[[], object], *, steps: int) -> float:
    """Time a step in milliseconds, as the mean over ``steps``."""
    step()  # the first after a change of variant includes what the variant before has left running
    barrier(context.rank)
    synchronize(context.device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize(context.device)
    return 1000 * (time.perf_counter() - start) / steps


def _without_optimizer(context: TrainContext, stream: MicroBatches, *, exchanges: bool) -> None:
    compute_gradients(context, stream, exchanges=exchanges)
    context.optimizer.zero_grad(set_to_none=True)


def unused_parameters(context: TrainContext, held: HeldStep) -> int:
    """Count the trainable parameters that get no gradient in a step. Collective."""
    compute_gradients(context, iter(held))
    unused = sum(parameter.requires_grad and parameter.grad is None for parameter in context.whole.parameters())
    context.optimizer.zero_grad(set_to_none=True)
    return unused


def record_trace(context: TrainContext, outbox: Outbox) -> None:
    """Record a trace of `TRACED_STEPS` steps of rank 0, for chrome://tracing or ui.perfetto.dev. Collective.

    The gzipped trace is stored in the run's folder as ``traces/<trial>.json.gz``. The model doesn't change.
    """
    with without_updates(context):
        stream = endless(context)
        _steps(context, stream, _SETTLING_STEPS)
        if context.rank.is_first:
            # Only rank 0: a single trace is enough, and the profiler slows a rank down.
            with profile(activities=_activities(context)) as profiler:
                _steps(context, stream, TRACED_STEPS)
            _send(profiler, context, outbox)
        else:
            _steps(context, stream, TRACED_STEPS)
    barrier(context.rank)  # the other ranks stay until rank 0 has written


def _steps(context: TrainContext, stream: MicroBatches, steps: int) -> None:
    for _ in range(steps):
        train_step(context, stream, step=0)
    synchronize(context.device)


def _activities(context: TrainContext) -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if context.device.type == "cuda" else [])]


def _send(profiler: profile, context: TrainContext, outbox: Outbox) -> None:
    name = f"traces/{context.trial.name}.json.gz"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json.gz"
        profiler.export_chrome_trace(str(path))
        outbox.file(path, name)
    outbox.event(ArtifactSaved(time=time.time(), trial=context.trial.name, path=name))

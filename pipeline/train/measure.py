"""The result of a trial, and what is measured after it: the parts of a step, what a step computes, a trace.

The wait for data is timed during training, since loader processes that fetch ahead make it depend on earlier steps.
The other parts are measured afterwards by leaving them out, since a profiler would change them: steps with gradient
exchange against steps without, steps with the optimizer against steps without, alternately (A B C A B C ...), so that
drift affects all equally, on a batch in memory. The learning rate is zero, and buffers are restored, so the model
doesn't change. A measurement that fails never costs the result of the training.
"""

import logging
import tempfile
import time
from collections.abc import Callable
from functools import cache, partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from pipeline.errors import ExperimentError, Stopped
from pipeline.protocol import estimates
from pipeline.protocol.events import ArtifactSaved, Trained, Warned
from pipeline.protocol.trial import Baseline, CellMeasurement, Measurement, Reference, Training, Trial
from pipeline.protocol.trial_result import StepParts, TrialResult
from pipeline.train import checks, flops, report
from pipeline.train.costs import alternate, costs
from pipeline.train.kept import (
    HeldStep,
    clear_gradients,
    compute_gradients,
    endless,
    forget_local_steps,
    held_step,
    keep_buffers,
    suspend_updates,
)
from pipeline.train.ranks import barrier, gather, matmul_precision, synchronize
from pipeline.train.state import State
from pipeline.train.turns import Complete, estimate_seconds, measure_in_turn
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


def result_of(s: State, *, start: int) -> TrialResult:
    """Return what was measured while the trial ran from step ``start`` on. Collective."""
    trial, meter, steady = s.trial, s.meter, s.meter.clock.steady
    return TrialResult(
        trial=trial.name,
        repeat=trial.repeat,
        steps=s.step,
        epochs=s.epoch_of(s.step),
        stopped_early=s.stop_reason,
        whole_training=s.order.samples_in(s.step if isinstance(trial, Training) else s.total_steps),
        samples_per_second=estimates.spread([lap.samples_per_second for lap in steady]),
        step_ms=estimates.spread([lap.step_ms for lap in steady]),
        parts=StepParts(
            data_wait_ms=median(lap.data_wait_ms for lap in steady), nodes=tuple(gather(s.rank.node, rank=s.rank))
        ),
        communication=meter.communication.result,
        peak_memory_mb=report.peak_memory_mb(s),
        held=report.measure_held(s),
        gpu_utilization=tuple(chain.from_iterable(gather(meter.gauge.means(), rank=s.rank))),
        energy=meter.energy.of(s.order.samples_in(s.step) - s.order.samples_in(start)),
        gpus=report.gpus(s),
        has_tf32=report.has_tf32(s),
        matmul_precision=matmul_precision(),
        compile_s=report.compile_s(s),
        gradient_mb=report.gradient_mb(s),
        coupling=checks.find_coupled_buffers(s),
        data_notes=s.batches.notes,
        losses=meter.first_losses,
        metrics=meter.reached,
    )


def add_measurements(s: State, result: TrialResult, *, complete: Complete) -> TrialResult:
    """Return the result with what is measured after the training; failures there never cost the result. Collective.

    ``complete`` runs the first steps of a trial that the training is compared with. Raises what `Afterwards` does.
    """
    trial, since, step_ms = s.trial, time.monotonic(), result.step_ms.median
    is_measured = not (isinstance(trial, Training) and trial.train_only)
    compares = is_measured and isinstance(trial, Training) and bool(trial.compared_with)
    estimate_s = None
    if compares and isinstance(trial, Training):
        variants = 3 if trial.workers > 1 else 2
        *_, parts_s = plan_rounds(trial, variants=variants, step_s=step_ms / 1000, total_steps=s.steps)
        estimate_s = parts_s + estimate_seconds(trial, step_s=step_ms / 1000)
    s.send(Trained(trial=trial.name, result=result, is_measured=is_measured, measuring_s=estimate_s))
    if not is_measured:
        return result
    afterwards, more = Afterwards(s), dict[str, Any]()
    held = cache(lambda: held_step(s))  # read once: each time, a stream would start another pass
    if parts := afterwards.measure("the parts of a step", lambda: probe(s, known=result.parts)):
        more["parts"] = parts
    if isinstance(trial, Training | CellMeasurement):  # what runs next to a training computes what it computes
        more["flops"] = afterwards.measure("the operations of a step", lambda: flops.count(s, held()))
    more["unused_parameters"] = afterwards.measure("unused parameters", lambda: unused_parameters(s, held())) or 0
    if isinstance(trial, Measurement) and trial.measures_costs:
        more["costs"] = afterwards.measure("what a prediction needs", lambda: costs(s))
    if isinstance(trial, Measurement) and trial.profile:
        afterwards.measure("the trace", lambda: record_trace(s))
    if compares:
        in_turn = partial(measure_in_turn, s, step_ms=step_ms, since=since, complete=complete)
        more |= afterwards.measure("the speedup", in_turn) or {}
    return result.model_copy(update=more)


class Afterwards:
    """A series of collective measurements; a rank that fails skips the rest, and ends with the training's result.

    With gloo the other ranks find its connections closed and do the same. A kernel of NCCL would wait on: there, unless
    all ranks fail, the rank ends with its error. The driver, which has the result by then, ends the others.
    """

    def __init__(self, s: State) -> None:
        self._s, self._has_failed = s, False

    def measure(self, what: str, measurement: Callable[[], T]) -> T | None:
        """Return a collective measurement's result; None, with a warning that names it, if it fails.

        Raises:
            ExperimentError: the experiment doesn't allow this measurement, on any rank.
            Stopped: the driver asked for it.
            Exception: the measurement's own error, while other ranks wait for this one in a kernel.
        """
        if self._has_failed:
            return None
        try:
            return measurement()
        except (ExperimentError, Stopped):
            raise
        except Exception as error:  # no error may cost the result of the training
            if not self._can_continue(what):
                raise
            _log.warning("%s could not be measured", what, exc_info=error)
            rank = self._s.rank
            where = f" on {rank.place}" if rank.world_size > 1 else ""
            message = f"{what} could not be measured{where}, the training is not affected: {first_line(error)}"
            self._s.outbox.event(Warned(trial=self._s.trial.name, message=message, subject="measuring"))
            self._has_failed = rank.world_size > 1
            return None

    def _can_continue(self, what: str) -> bool:
        """Return True if no other rank waits for this one, which has failed."""
        world_size = self._s.rank.world_size
        if world_size == 1 or dist.get_backend() == "gloo":
            return True
        store, key = dist.distributed_c10d._get_default_store(), f"{self._s.trial.name}: {what} failed"
        deadline = time.monotonic() + _AGREEMENT_S
        failed: int = store.add(key, 1)
        while failed < world_size and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            failed = store.add(key, 0)
        return failed == world_size


def plan_rounds(trial: Trial, *, variants: int, step_s: float, total_steps: int) -> tuple[int, int, float]:
    """Return rounds, timed steps of each variant in a round, and seconds of all rounds, for a trial with such steps."""
    budget_s = BUDGET_OF_MEASUREMENT_SECONDS
    if isinstance(trial, Training):
        least, most = BUDGET_SECONDS
        budget_s = min(most, max(least, BUDGET_SHARE * total_steps * step_s))
    steps = max(1, min(10, int(SLOT_SECONDS / step_s)))
    round_s = variants * (steps + 1) * step_s
    rounds = max(FEWEST_ROUNDS, min(ROUNDS, int(budget_s / round_s)))
    return rounds, steps, rounds * round_s


def probe(s: State, *, known: StepParts) -> StepParts:
    """Measure the parts of a step after a training, and add those ``known``. Collective."""
    laps = s.meter.clock.steady
    step_ms = max(gather(laps[0].step_ms, rank=s.rank))  # all ranks need the same number of steps
    rounds, steps, _ = plan_rounds(
        s.trial, variants=2 + (s.rank.world_size > 1), step_s=step_ms / 1000, total_steps=s.steps
    )

    norms = [one for one in s.wrapped.modules() if isinstance(one, nn.SyncBatchNorm)]  # which send in each pass
    groups = [one.process_group for one in norms]
    alone = dist.new_subgroups(group_size=1)[0] if norms and dist.is_initialized() else None  # type: ignore[no-untyped-call]

    def compute() -> None:
        for norm in norms:
            norm.process_group = alone
        try:
            compute_gradients(s, iter(held), exchange=False)
        finally:
            for norm, group in zip(norms, groups, strict=True):
                norm.process_group = group

    def timed(step: Callable[[], object]) -> float:
        step()  # the first after a change of variant includes what the variant before has left running
        barrier(s.rank)
        synchronize(s.device)
        start = time.perf_counter()
        for _ in range(steps):
            step()
        synchronize(s.device)
        ms = 1000 * (time.perf_counter() - start) / steps
        forget_local_steps(s, held)
        return ms

    with suspend_updates(s):
        held = held_step(s)
        variants = {
            "computed": lambda: timed(compute),
            "whole": lambda: timed(lambda: s.train_step(s, iter(held), step=0)),
        }
        if s.rank.world_size > 1:
            variants["exchanged"] = lambda: timed(lambda: compute_gradients(s, iter(held)))
        whose = f" of the {s.trial.role}" if isinstance(s.trial, Baseline | Reference) else ""
        times = alternate(variants, rank=s.rank, rounds=rounds, what=f"the step time{whose}")
    ranks = gather((times, median(lap.own_wait_ms for lap in laps)), rank=s.rank)
    # Ranks wait for each other, so the slowest rank's time counts.
    slowest = {name: [max(each) for each in zip(*(own[name] for own, _ in ranks), strict=True)] for name in times}
    computed, exchanged = slowest["computed"], slowest.get("exchanged")
    paces = [[ms + wait for ms in own["computed"]] for own, wait in ranks]

    def excess(longer: list[float], shorter: list[float]) -> float:
        """Return the median of the differences in each round, at least 0: a negative one is noise."""
        return max(0.0, median(a - b for a, b in zip(longer, shorter, strict=True)))

    measured = {
        "held_ms": estimates.spread(slowest["whole"]),
        "compute_ms": median(computed),
        "exposed_communication_ms": excess(exchanged, computed) if exchanged else None,
        "rest_ms": excess(slowest["whole"], exchanged or computed),
        "ranks": tuple(estimates.spread(pace, keeps_values=True) for pace in paces),
    }
    return known.model_copy(update=measured)


def unused_parameters(s: State, held: HeldStep) -> int:
    """Count the trainable parameters that get no gradient in a step. Collective."""
    with keep_buffers(s.trainee):
        s.train_step(s, iter(held), step=0, update=False)
    unused = sum(1 for one in s.trainee.parameters() if one.requires_grad and one.grad is None)
    clear_gradients(s)
    return unused


def record_trace(s: State) -> None:
    """Record a trace of `TRACED_STEPS` steps of rank 0 in traces/TRIAL.json.gz of the run's folder. Collective."""
    with suspend_updates(s):
        stream = endless(s)

        def take(steps: int) -> None:
            for _ in range(steps):
                s.train_step(s, stream, step=0)
            synchronize(s.device)

        take(_SETTLING_STEPS)
        if not s.rank.is_first:  # a single trace is enough, and the profiler slows a rank down
            take(TRACED_STEPS)
        else:
            on_gpu = [ProfilerActivity.CUDA] if s.device.type == "cuda" else []
            with profile(activities=[ProfilerActivity.CPU, *on_gpu]) as profiler:
                take(TRACED_STEPS)
            name = f"traces/{s.trial.name}.json.gz"
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "trace.json.gz"
                profiler.export_chrome_trace(str(path))
                s.outbox.file(path, name)
            s.send(ArtifactSaved(trial=s.trial.name, path=name))
    barrier(s.rank)  # the other ranks stay until rank 0 has written

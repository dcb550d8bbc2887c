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

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from pipeline.errors import ExperimentError, Stopped
from pipeline.protocol import estimates
from pipeline.protocol.events import ArtifactSaved, Trained, Warned
from pipeline.protocol.trial import Baseline, CellMeasurement, Measurement, Reference, Training, Trial
from pipeline.protocol.trial_result import Held, StepParts, TrialResult
from pipeline.train import checks, report
from pipeline.train.costs import alternate, costs, count_operations
from pipeline.train.kept import (
    compute_gradients,
    endless,
    forget_local_steps,
    held_step,
    suspend_updates,
)
from pipeline.train.ranks import barrier, gather, synchronize
from pipeline.train.state import State
from pipeline.train.turns import Complete, estimate_seconds, measure_in_turn
from pipeline.wording import first_line

T = TypeVar("T")
_log = logging.getLogger(__name__)

_ROUNDS, _FEWEST_ROUNDS = 7, 3
_SLOT_SECONDS = 0.2  # long enough for the clock
_BUDGET_SHARE = 0.1  # of a training's time; long steps are measured in fewer rounds
_BUDGET_SECONDS = (1.0, 8.0)  # least and most
_BUDGET_OF_MEASUREMENT_SECONDS = 4.0  # a measurement is shorter than a training itself
TRACED_STEPS = 3
_SETTLING_STEPS = 2  # which absorb the profiler's start and what the measurement before has left running


def result_of(s: State, *, start: int) -> TrialResult:
    """Return what was measured while the trial ran from step ``start`` on. Collective."""
    trial, meter, steady, gpus = s.trial, s.meter, s.meter.clock.steady, s.strategy.gpus
    own = (
        s.rank.node,
        s.compiling.seconds if s.compiling is not None else 0.0,
        report.held_mb(s),
        report.peaks_mb(s),
        meter.gauge.means(),
        [torch.cuda.get_device_name(gpu) for gpu in gpus],
    )
    nodes, compile_s, held, *of_devices = zip(*gather(own, rank=s.rank), strict=True)
    peaks, utilization, names = (tuple(chain(*each)) for each in of_devices)
    return TrialResult(
        trial=trial.name,
        repeat=trial.repeat,
        steps=s.step,
        epochs=s.epoch_of(s.step),
        stopped_early=s.stop_reason,
        whole_training=s.order.samples_in(s.step if isinstance(trial, Training) else s.total_steps),
        samples_per_second=estimates.spread([lap.samples_per_second for lap in steady]),
        step_ms=estimates.spread([lap.step_ms for lap in steady]),
        parts=StepParts(data_wait_ms=median(lap.data_wait_ms for lap in steady), nodes=nodes),
        communication=meter.communication.result,
        peak_memory_mb=peaks,
        held=Held(mb=held, cut=s.strategy.describe()),
        gpu_utilization=utilization,
        energy=meter.energy.of(s.order.samples_in(s.step) - s.order.samples_in(start)),
        gpus=names,
        compile_s=max(compile_s) if s.compiling is not None else None,
        gradient_mb=sum(one.numel() * one.element_size() for one in s.trainable.values()) / 2**20,
        coupling=checks.find_coupled_buffers(s),
        data_notes=s.batches.notes,
        losses=meter.first_losses,
        metrics=meter.reached,
    )


def add_measurements(
    s: State, result: TrialResult, *, complete: Complete, export: Callable[[], None] = lambda: None
) -> TrialResult:
    """Return the result with what is measured after the training; failures there never cost the result. Collective.

    ``export`` exports the trained model, before the measurements, which a Ctrl-C may end.
    """
    trial, since, step_ms = s.trial, time.monotonic(), result.step_ms.median
    is_measured = not (isinstance(trial, Training) and trial.train_only)
    compares, estimate_s = False, None
    if is_measured and isinstance(trial, Training) and trial.compared_with:
        compares = True
        variants = 3 if trial.workers > 1 else 2
        *_, parts_s = plan_rounds(trial, variants=variants, step_s=step_ms / 1000, total_steps=s.steps)
        estimate_s = parts_s + estimate_seconds(trial, step_s=step_ms / 1000)
    s.send(Trained(trial=trial.name, result=result, is_measured=is_measured, measuring_s=estimate_s))
    export()
    if not is_measured:
        return result
    afterwards, more = Afterwards(s), dict[str, Any]()
    held = cache(lambda: held_step(s))  # read once: each time, a stream would start another pass
    if parts := afterwards.measure("the parts of a step", lambda: probe(s, known=result.parts)):
        more["parts"] = parts
    if isinstance(trial, Training | CellMeasurement):  # what runs next to a training computes what it computes
        more["flops"] = afterwards.measure("the operations of a step", lambda: count_operations(s, held()))
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

    With gloo the other ranks find its connections closed and do the same. A kernel of NCCL would wait on: there the
    rank ends with its error. The driver, which has the result by then, ends the others.
    """

    def __init__(self, s: State) -> None:
        self._s, self._has_failed = s, False

    def measure(self, what: str, measurement: Callable[[], T]) -> T | None:
        """Return a collective measurement's result; None, with a warning that names it, if it fails."""
        if self._has_failed:
            return None
        try:
            return measurement()
        except (ExperimentError, Stopped):
            raise
        except Exception as error:  # no error may cost the result of the training
            rank = self._s.rank
            if rank.world_size > 1 and dist.get_backend() != "gloo":
                raise
            _log.warning("%s could not be measured", what, exc_info=error)
            where = f" on {rank.place}" if rank.world_size > 1 else ""
            message = f"{what} could not be measured{where}, the training is not affected: {first_line(error)}"
            self._s.outbox.event(Warned(trial=self._s.trial.name, message=message, subject="measuring"))
            self._has_failed = rank.world_size > 1
            return None


def plan_rounds(trial: Trial, *, variants: int, step_s: float, total_steps: int) -> tuple[int, int, float]:
    """Return rounds, timed steps of each variant in a round, and seconds of all rounds, for a trial with such steps."""
    budget_s = _BUDGET_OF_MEASUREMENT_SECONDS
    if isinstance(trial, Training):
        least, most = _BUDGET_SECONDS
        budget_s = min(most, max(least, _BUDGET_SHARE * total_steps * step_s))
    steps = max(1, min(10, int(_SLOT_SECONDS / step_s)))
    round_s = variants * (steps + 1) * step_s
    rounds = max(_FEWEST_ROUNDS, min(_ROUNDS, int(budget_s / round_s)))
    return rounds, steps, rounds * round_s


def probe(s: State, *, known: StepParts) -> StepParts:
    """Measure the parts of a step after a training, and add those ``known``. Collective."""
    laps = s.meter.clock.steady
    step_ms = max(gather(laps[0].step_ms, rank=s.rank))  # all ranks need the same number of steps
    rounds, steps, _ = plan_rounds(
        s.trial, variants=2 + (s.rank.world_size > 1), step_s=step_ms / 1000, total_steps=s.steps
    )

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
            "computed": lambda: timed(lambda: compute_gradients(s, iter(held), exchange=False)),
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

    def excess(longer: list[float], shorter: list[float]) -> list[float]:
        """Return the differences in each round, at least 0: a negative one is noise."""
        return [max(0.0, a - b) for a, b in zip(longer, shorter, strict=True)]

    parts = {"compute_ms": computed, "rest_ms": excess(slowest["whole"], exchanged or computed)}
    if exchanged is not None:
        parts["exposed_communication_ms"] = excess(exchanged, computed)
    measured = {
        "held_ms": estimates.spread(slowest["whole"]),
        **{name: median(rounds) for name, rounds in parts.items()},
        "ranges": {name: (min(rounds), max(rounds)) for name, rounds in parts.items()},
        "ranks": tuple(estimates.spread(pace, keeps_values=True) for pace in paces),
    }
    return known.model_copy(update=measured)


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

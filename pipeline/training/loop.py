"""The training loop: epochs, steps, reports, evaluation and checkpoints of one rank.

Every rank runs this code on its share of each global batch, whichever launcher started its process.
"""

import math
import time
from collections.abc import Sequence
from functools import cache, partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pipeline.errors import Stopped
from pipeline.protocol.estimates import spread
from pipeline.protocol.events import Outbox, Phase, Point
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import CellMeasurement, Measurement, Training, Trial
from pipeline.protocol.trial_result import Best, TrialResult
from pipeline.training.build import build
from pipeline.training.checkpoints.manager import CheckpointManager, placed
from pipeline.training.checks import coupling
from pipeline.training.checks.nonfinite import check_weights
from pipeline.training.context import TrainContext
from pipeline.training.evaluation import pictures
from pipeline.training.evaluation.held_out import evaluate
from pipeline.training.evaluation.held_out import prepare as prepare_evaluation
from pipeline.training.feature import follow_evaluation
from pipeline.training.measuring import flops
from pipeline.training.measuring.compared_trials import rates_over
from pipeline.training.measuring.costs import costs
from pipeline.training.measuring.probe import Afterwards, plan_rounds, probe, record_trace, unused_parameters, waits
from pipeline.training.measuring.turns import estimate_seconds, measure_in_turn
from pipeline.training.meters.clock import Clock, Lap
from pipeline.training.meters.meter import Meter
from pipeline.training.model import frozen
from pipeline.training.model.metrics import Drawable
from pipeline.training.ranks.collectives import from_first, gather
from pipeline.training.ranks.matmul_precision import matmul_precision
from pipeline.training.ranks.watch import mark, mark_step
from pipeline.training.result import reporting
from pipeline.training.start_checks import check_built
from pipeline.training.step import logs, train_step
from pipeline.training.step.dry_run import compile_ahead, held_step
from pipeline.training.step.global_batch import late_pass


def train(trial: Trial, *, rank: Rank, outbox: Outbox) -> TrialResult:
    """Run a trial on this rank. All ranks return the same result; rank 0 sends the events.

    Raises:
        ExperimentError: the experiment can't be trained as it is written.
        TrainingError: training failed, e.g. the loss is not finite.
        Stopped: the driver asked for it; the newest checkpoint is that of the last step.
    """
    return complete(build(placed(trial, rank=rank), rank=rank), outbox)


def complete(context: TrainContext, outbox: Outbox) -> TrialResult:
    """Run a trial that is built, see `train`."""
    trial = context.trial
    clock = Clock(
        device=context.device, warmup_steps=trial.experiment.benchmark.warmup_steps, compiling=context.built.compiling
    )
    meter = Meter(context=context, clock=clock, outbox=outbox)
    manager = CheckpointManager(context, meter=meter, outbox=outbox)
    is_training = isinstance(trial, Training)
    check_built(context, outbox)
    compile_ahead(context)
    with manager:
        meter.step = start = manager.resume()
        meter.cadence.start(start)
        for epoch in range(start // context.order.steps_per_epoch, context.epochs):
            if context.is_over(meter.step):
                break
            train_epoch(context, epoch=epoch, start=start, meter=meter, manager=manager)
        best = manager.load_best() if is_training else None
        unsaved = manager.unsaved() if is_training else None
    with TemporaryDirectory() as folder:
        if isinstance(trial, Training):
            meter.finiteness.summarize()
            evaluate_test(context, meter=meter, best=best)
            reporting.model(context, outbox, folder=Path(folder), best=best)
        result = _result(context, meter, start=start).model_copy(update={"unsaved": unsaved})
        if best is not None:
            chosen = {"best": best, "data_notes": (*result.data_notes, *manager.notes)}
            result = result.model_copy(update={**chosen, "metrics": {**result.metrics, **best.metrics}})
        result = measured(context, result, laps=clock.steady, outbox=outbox)
        if isinstance(trial, Training):  # last, as it takes memory, which the result tells, and may fail
            reporting.exported_model(trial, outbox, folder=Path(folder))
    return result


def evaluate_test(context: TrainContext, *, meter: Meter, best: Best | None) -> None:
    """Evaluate the test set, if there is one, with the weights of the result. Collective."""
    step = best.step if best else meter.step
    epoch = math.ceil(step / context.order.steps_per_epoch)
    show = partial(reporting.curve, context=context, outbox=meter.outbox)
    warn = partial(reporting.warn_of_metrics, context, meter.outbox)
    values = evaluate(context, split="test", show=lambda name, curve: show(f"test {name}", curve), warn=warn)
    meter.send([Point(name, step, value) for name, value in values.items()], step=step, epoch=epoch)


def _result(context: TrainContext, meter: Meter, *, start: int) -> TrialResult:
    """Return what was measured while the trial ran from step ``start`` on. Collective."""
    trial, steady = context.trial, meter.clock.steady
    return TrialResult(
        trial=trial.name,
        repeat=trial.repeat,
        steps=meter.step,
        epochs=math.ceil(meter.step / context.order.steps_per_epoch),
        stopped_early=context.stop_reason,
        whole_training=context.order.samples_in(meter.step if isinstance(trial, Training) else context.total_steps),
        samples_per_second=spread([lap.samples_per_second for lap in steady]),
        step_ms=spread([lap.step_ms for lap in steady]),
        parts=waits(context, laps=steady),
        communication=meter.communication.result,
        peak_memory_mb=reporting.peak_memory_mb(context),
        held=reporting.held(context),
        gpu_utilization=tuple(chain.from_iterable(gather(meter.gauge.means(), rank=context.rank))),
        energy=meter.energy.of(context.order.samples_in(meter.step) - context.order.samples_in(start)),
        gpus=reporting.gpus(context),
        has_tf32=reporting.has_tf32(context),
        matmul_precision=matmul_precision(),
        compile_s=reporting.compile_s(context),
        gradient_mb=reporting.gradient_mb(context.whole),
        coupling=coupling.layers(context.model) + meter.coupling.found,
        data_notes=context.batches.notes,
        losses=meter.first_losses,
        metrics=meter.reached,
    )


def measured(context: TrainContext, result: TrialResult, *, laps: Sequence[Lap], outbox: Outbox) -> TrialResult:
    """Return the result with what is measured after the training; failures there never cost the result."""
    trial = context.trial
    more: dict[str, Any] = {}
    since, step_ms = time.monotonic(), result.step_ms.median
    estimate_s = estimate_measuring_s(trial, step_s=step_ms / 1000, steps=context.steps)
    afterwards = Afterwards(context, result, estimate_s=estimate_s, outbox=outbox)
    if isinstance(trial, Training) and trial.train_only:
        return result
    if parts := afterwards.measure("the parts of a step", lambda: probe(context, laps=laps, known=result.parts)):
        more["parts"] = parts
    more |= _of_one_step(context, afterwards, outbox=outbox)
    if isinstance(trial, Measurement) and trial.measures_costs:
        more["costs"] = afterwards.measure("what a prediction needs", lambda: costs(context))
    if isinstance(trial, Measurement) and trial.profile:
        afterwards.measure("the trace", lambda: record_trace(context, outbox))
    if isinstance(trial, Training) and trial.compared_with:
        in_turn = partial(measure_in_turn, context, step_ms=step_ms, since=since, outbox=outbox, complete=complete)
        if found := afterwards.measure("the speedup", in_turn):
            more |= found._asdict() | rates_over(found.slots, batch=trial.experiment.train.global_batch_size)
    return result.model_copy(update=more)


def estimate_measuring_s(trial: Trial, *, step_s: float, steps: int) -> float | None:
    """Return about how long `measured` takes after a training of ``steps`` steps; None without a speedup."""
    if not isinstance(trial, Training) or trial.train_only or not trial.compared_with:
        return None
    parts = plan_rounds(trial, variants=3 if trial.workers > 1 else 2, step_s=step_s, total_steps=steps)
    return parts.seconds + estimate_seconds(trial, step_s=step_s)


def _of_one_step(context: TrainContext, afterwards: Afterwards, *, outbox: Outbox) -> dict[str, Any]:
    """Measure what a single step tells: its operations, and the parameters that get no gradient. Collective."""
    held = cache(lambda: held_step(context))  # read once: each time, a stream would start another pass
    more: dict[str, Any] = {}
    if isinstance(context.trial, Training | CellMeasurement):  # what runs beside a training computes what it computes
        count = partial(flops.count, context, outbox=outbox)
        more["flops"] = afterwards.measure("the operations of a step", lambda: count(held()))
    unused = afterwards.measure("unused parameters", lambda: unused_parameters(context, held()))
    return {**more, "unused_parameters": unused or 0}


def train_epoch(context: TrainContext, *, epoch: int, start: int, meter: Meter, manager: CheckpointManager) -> None:
    """Train an epoch (counted from 0) from step ``start`` of the trial on, up to the trial's last step."""
    context.wrapped.train()
    first = epoch * context.order.steps_per_epoch
    order = context.order
    last = min(first + order.steps_per_epoch, context.steps)
    begin = max(first, start)
    stream = meter.waits.timed(context.batches.training(epoch, first=begin - first))
    meter.clock.resume()
    around = late_pass()
    for step in range(begin, last):
        mark_step(step)
        if step == start:
            meter.coupling.note()
        with around:
            result = train_step(context, stream, step=step)
        mark(Phase.REPORTING)
        meter.add(result, samples=order.batch_size(step - first))
        if not result.has_updated:
            meter.finiteness.note_skipped(step + 1)
        if step == start:
            reporting.first_step(context, meter.outbox)
            with meter.clock.stopped():
                meter.coupling.observe(meter.outbox, step=step)
                manager.note_first_step()
                context.seen.log_names = logs.agree(context.seen.log_names, rank=context.rank)
                prepare_evaluation(context)
        if meter.cadence.is_due(step + 1) or meter.finiteness.is_exhausted:
            meter.flush(step=step + 1, epoch=epoch + 1)
            if isinstance(context.trial, Training):
                reporting.warn_of_reading(context, meter.outbox)
                frozen.check_unchanged(
                    context.built.trainable, model=context.model, learned=context.learned, step=step + 1
                )
                for feature in context.features:
                    feature.after_report(step=step + 1, seconds=meter.window_s)
                after_report(context, step=step + 1, epoch=epoch + 1, meter=meter, manager=manager)
                if context.is_over(step + 1):
                    break


def after_report(context: TrainContext, *, step: int, epoch: int, meter: Meter, manager: CheckpointManager) -> None:
    """Evaluate and save a checkpoint, each if it is due after ``step`` steps.

    Raises:
        Stopped: the driver asked for it; a checkpoint of this step is saved.
    """
    evaluates, ends_epoch = context.is_evaluation_step(step), step % context.order.steps_per_epoch == 0
    saves = context.is_over(step) or ends_epoch or meter.stop_agreed or manager.is_due(step)
    if not (evaluates or saves):
        return
    check_weights(context, step=step)
    values = validate(context, step=step, epoch=epoch, meter=meter) if evaluates else {}
    best = values.get(context.experiment.checkpoint.best or "")
    if saves or best is not None or context.is_over(step):
        mark(Phase.SAVING)
        manager.save(step=step, metric=best)
    if meter.stop_agreed:
        raise Stopped
    meter.clock.resume()


def validate(context: TrainContext, *, step: int, epoch: int, meter: Meter) -> dict[str, float]:
    """Evaluate after ``step`` steps; report the values, and tell them to what follows them. Collective."""
    pictures.log(context, meter.outbox, step=step)
    curves: dict[str, Drawable] = {}
    warn = partial(reporting.warn_of_metrics, context, meter.outbox)
    values = evaluate(context, show=curves.__setitem__, warn=warn)
    meter.send([Point(name, step, value) for name, value in values.items()], step=step, epoch=epoch)
    if not values:
        return values
    meter.finiteness.judge_validation(values["validation/loss"], step=step, epoch=epoch)
    values = from_first(lambda: values, rank=context.rank)
    more = [point for one in context.features for point in follow_evaluation(one, values, step=step)]
    meter.send(more, step=step, epoch=epoch)
    if context.is_over(step):
        for name, curve in curves.items():
            reporting.curve(name, curve, context=context, outbox=meter.outbox)
    return values

"""The training loop: epochs, steps, reports, evaluation and checkpoints of one rank.

Every rank runs this code on its share of each global batch, whichever launcher started its process.
"""

from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pipeline.errors import Stopped
from pipeline.protocol.estimates import spread
from pipeline.protocol.events import Outbox, Phase, Point
from pipeline.protocol.trial import Measurement, Probe, Rank, Training, Trial
from pipeline.protocol.trial_result import TrialResult
from pipeline.training import logs, reporting
from pipeline.training.build import build
from pipeline.training.checkpoints.manager import CheckpointManager, placed
from pipeline.training.clock import Clock, Lap
from pipeline.training.collectives import gather
from pipeline.training.context import TrainContext
from pipeline.training.costs import costs
from pipeline.training.dry_run import compile_ahead
from pipeline.training.evaluation import evaluate
from pipeline.training.evaluation import prepare as prepare_evaluation
from pipeline.training.meter import Meter
from pipeline.training.nonfinite import check_weights
from pipeline.training.nvtx import annotated
from pipeline.training.probe import Afterwards, probe, record_trace, unused_parameters, waits
from pipeline.training.step import optimizer_step
from pipeline.training.turns import measure_in_turn
from pipeline.training.watch import mark, mark_step


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
    with annotated(context, outbox):
        return _complete(context, outbox)


def _complete(context: TrainContext, outbox: Outbox) -> TrialResult:
    trial = context.trial
    clock = Clock(
        device=context.device, warmup_steps=trial.experiment.measure.warmup_steps, compiling=context.compiling
    )
    meter = Meter(context=context, clock=clock, outbox=outbox)
    manager = CheckpointManager(context, meter=meter, outbox=outbox)
    is_training = isinstance(trial, Training)
    reporting.start(context, outbox)
    reporting.matmul_precision(context, outbox)
    if is_training:
        reporting.averaging(context, outbox)
    compile_ahead(context)
    with manager:
        start = manager.resume()
        for epoch in range(start // context.order.steps_per_epoch, context.epochs):
            train_epoch(context, epoch=epoch, start=start, meter=meter, manager=manager)
            if is_training:
                end_epoch(context, epoch=epoch, meter=meter, manager=manager)
                if meter.stop_agreed:
                    raise Stopped
    with TemporaryDirectory() as folder:
        if isinstance(trial, Training):
            meter.finiteness.summarize()
            reporting.model(context, outbox, folder=Path(folder))
        result = measured(context, _result(context, meter), laps=clock.steady, outbox=outbox)
        if isinstance(trial, Training):  # last, as it takes memory, which the result tells, and may fail
            reporting.exported_model(trial, outbox, folder=Path(folder))
    return result


def _result(context: TrainContext, meter: Meter) -> TrialResult:
    """Return what was measured while the trial ran. Collective."""
    trial, steady = context.trial, meter.clock.steady
    windows = partial(spread, keeps_values=isinstance(trial, Probe))  # a prediction carries their noise on
    return TrialResult(
        trial=trial.name,
        repeat=trial.repeat,
        steps=context.steps,
        whole_training=context.order.samples * context.experiment.train.epochs,
        samples_per_second=windows([lap.samples_per_second for lap in steady]),
        step_ms=windows([lap.step_ms for lap in steady]),
        parts=waits(context, laps=steady),
        peak_memory_mb=reporting.peak_memory_mb(context),
        held=reporting.held(context),
        gpu_utilization=tuple(chain.from_iterable(gather(meter.gauge.means(), rank=context.rank))),
        gpus=reporting.gpus(context),
        matmul_precision=torch.get_float32_matmul_precision(),
        compile_s=reporting.compile_s(context),
        gradient_mb=reporting.gradient_mb(context.whole),
        coupling=reporting.coupling_layers(context.model),
        losses=meter.first_losses,
        metrics=meter.reached,
    )


def measured(context: TrainContext, result: TrialResult, *, laps: Sequence[Lap], outbox: Outbox) -> TrialResult:
    """Return the result with what is measured after the training; failures there never cost the result."""
    trial = context.trial
    more: dict[str, Any] = {}
    afterwards = Afterwards(context, result, outbox=outbox)
    if isinstance(trial, Training) and trial.train_only:
        return result
    if parts := afterwards.measure("the parts of a step", lambda: probe(context, laps=laps, known=result.parts)):
        more["parts"] = parts
    more["unused_parameters"] = afterwards.measure("unused parameters", lambda: unused_parameters(context)) or 0
    if isinstance(trial, Probe):
        more["costs"] = afterwards.measure("what a prediction needs", lambda: costs(context))
    if isinstance(trial, Measurement) and trial.profile:
        afterwards.measure("the trace", lambda: record_trace(context, outbox))
    if isinstance(trial, Training) and trial.compared_with:
        step_ms = result.step_ms.median
        in_turn = partial(measure_in_turn, context, step_ms=step_ms, outbox=outbox, complete=complete)
        if found := afterwards.measure("the speedup", in_turn):
            more |= found._asdict()
    return result.model_copy(update=more)


def train_epoch(context: TrainContext, *, epoch: int, start: int, meter: Meter, manager: CheckpointManager) -> None:
    """Train an epoch (counted from 0) from step ``start`` of the trial on, up to the trial's last step."""
    context.wrapped.train()
    first = epoch * context.order.steps_per_epoch
    last = min(first + context.order.steps_per_epoch, context.steps)
    begin = max(first, start)
    stream = meter.waits.timed(context.batches.training(epoch, first=begin - first))
    meter.clock.resume()
    for step in range(begin, last):
        mark_step(step)
        result = optimizer_step(context, stream, step=step)
        mark(Phase.REPORTING)
        meter.add(result, samples=context.order.batch_size(step - first))
        meter.finiteness.note(step + 1, is_skipped=result.is_skipped)
        if step == start:
            reporting.first_step(context, meter.outbox)
            with meter.clock.stopped():
                context.log_names = logs.agree(context.log_names, rank=context.rank)
                prepare_evaluation(context)
        if meter.cadence.is_due(step + 1) or meter.finiteness.is_exhausted:
            meter.flush(step=step + 1, epoch=epoch + 1)
            if step + 1 < last and (meter.stop_agreed or manager.is_due(step + 1)):  # the end of an epoch saves anyway
                check_weights(context, step=step + 1)
                mark(Phase.SAVING)
                manager.save(step=step + 1)
                if meter.stop_agreed:
                    raise Stopped
                meter.clock.resume()


def end_epoch(context: TrainContext, *, epoch: int, meter: Meter, manager: CheckpointManager) -> None:
    """Evaluate if it is due, advance an epoch-wise scheduler, and save a checkpoint."""
    last = epoch + 1 == context.epochs
    step = context.order.steps_per_epoch * (epoch + 1)
    check_weights(context, step=step)
    values: dict[str, float] = {}
    if last or (epoch + 1) % context.experiment.train.evaluate_every_epochs == 0:
        show = partial(reporting.curve, context=context, outbox=meter.outbox) if last else None
        values = evaluate(context, show=show)
        meter.send([Point(name, step, value) for name, value in values.items()], step=step, epoch=epoch + 1)
        if values:
            meter.finiteness.judge_validation(values["validation/loss"], step=step, epoch=epoch + 1)
    if context.scheduler is not None and context.experiment.train.scheduler_interval == "epoch":
        if not isinstance(context.scheduler, ReduceLROnPlateau):
            context.scheduler.step()
        elif values:
            context.scheduler.step(values["validation/loss"])
    mark(Phase.SAVING)
    manager.save(step=step, metric=values.get(context.experiment.checkpoint.best or ""))

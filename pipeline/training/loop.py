"""The training loop, from top to bottom.

Every rank runs this code on its share of each global batch; nothing here depends on who started the process.
"""

from collections.abc import Sequence
from functools import partial
from itertools import chain

from torch.optim.lr_scheduler import ReduceLROnPlateau

from pipeline.contract import Rank, Trial, TrialResult
from pipeline.errors import Stopped
from pipeline.estimates import spread
from pipeline.events import Outbox, Phase, Point
from pipeline.training import announce, trace
from pipeline.training.afterwards import Afterwards
from pipeline.training.build import build
from pipeline.training.checkpoints.keeper import Keeper, placed
from pipeline.training.clock import Clock, Lap
from pipeline.training.collective import gather
from pipeline.training.costs import costs
from pipeline.training.evaluation import evaluate
from pipeline.training.evaluation import prepare as prepare_evaluation
from pipeline.training.meter import Meter
from pipeline.training.nonfinite import check_weights
from pipeline.training.probe import probe, unused_parameters, waits
from pipeline.training.rehearsal import compile_ahead
from pipeline.training.setup import Setup
from pipeline.training.step import optimizer_step
from pipeline.training.stream import Streams
from pipeline.training.watch import mark, mark_step


def train(trial: Trial, *, rank: Rank, outbox: Outbox, streams: Streams | None = None) -> TrialResult:
    """Run a trial on this rank. All ranks return the same result; rank 0 reports on the way.

    ``streams`` come from the launcher instead of the data that the experiment names.

    Raises:
        ExperimentError: the experiment can't be trained as it is written.
        TrainingError: training failed, e.g. the loss is not finite.
        Stopped: the driver asked for it; the newest checkpoint is of the last step.
    """
    setup = build(placed(trial, rank=rank), rank=rank, streams=streams)
    clock = Clock(device=setup.device, warmup_steps=trial.experiment.measure.warmup_steps, compiling=setup.compiling)
    meter = Meter(setup=setup, clock=clock, outbox=outbox)
    keeper = Keeper(setup, meter=meter, outbox=outbox)
    announce.start(setup, outbox)
    announce.averaging(setup, outbox)
    compile_ahead(setup)
    with keeper:
        start = keeper.resume()
        for epoch in range(start // setup.order.steps_per_epoch, setup.epochs):
            train_epoch(setup, epoch=epoch, start=start, meter=meter, keeper=keeper)
            if not trial.is_measurement:
                end_epoch(setup, epoch=epoch, meter=meter, keeper=keeper)
                if meter.stop_agreed:
                    raise Stopped
    if not trial.is_measurement:
        meter.finiteness.summarize()
        announce.model(setup, outbox)
    steady = clock.steady
    result = TrialResult(
        trial=trial.name,
        repeat=trial.repeat,
        steps=setup.steps,
        samples_per_second=spread([lap.samples_per_second for lap in steady]),
        step_ms=spread([lap.step_ms for lap in steady]),
        parts=waits(setup, laps=steady),
        peak_memory_mb=announce.peak_memory_mb(setup),
        held=announce.held(setup),
        gpu_utilization=tuple(chain.from_iterable(gather(meter.gauge.means(), rank=rank))),
        compile_s=announce.compile_s(setup),
        gradient_mb=announce.gradient_mb(setup.whole),
        coupling=announce.coupling_layers(setup.model),
        losses=meter.first_losses,
        metrics=meter.reached,
    )
    return measured(setup, result, laps=steady, outbox=outbox)


def measured(setup: Setup, result: TrialResult, *, laps: Sequence[Lap], outbox: Outbox) -> TrialResult:
    """The result with all that is measured once the training is done. What fails of that never costs the result."""
    trial = setup.trial
    afterwards = Afterwards(setup, result, outbox=outbox)
    parts = afterwards.measure("the parts of a step", lambda: probe(setup, laps=laps, known=result.parts))
    unused = afterwards.measure("unused parameters", lambda: unused_parameters(setup))
    known = afterwards.measure("what a prediction needs", lambda: costs(setup)) if trial.role == "probe" else None
    if trial.profile:
        afterwards.measure("the trace", lambda: trace.record(setup, outbox))
    return result.model_copy(update={"parts": parts or result.parts, "unused_parameters": unused or 0, "costs": known})


def train_epoch(setup: Setup, *, epoch: int, start: int, meter: Meter, keeper: Keeper) -> None:
    """Train one epoch (counted from 0), or what is left of it after ``start`` steps, or of the trial's steps."""
    setup.wrapped.train()
    first = epoch * setup.order.steps_per_epoch
    last = min(first + setup.order.steps_per_epoch, setup.steps)
    begin = max(first, start)
    batches = setup.train_loader.batches(setup.draws(epoch, first=begin - first))
    stream = meter.waits.timed(setup.prefetched(batches))
    meter.clock.resume()
    for step in range(begin, last):
        mark_step(step)
        result = optimizer_step(setup, stream, step=step)
        mark(Phase.REPORTING)
        meter.add(result, samples=setup.order.batch_size(step - first))
        meter.finiteness.note(step + 1, is_skipped=result.is_skipped)
        if step == start:
            announce.first_step(setup, meter.outbox)
            with meter.clock.stopped():
                prepare_evaluation(setup)
        if meter.cadence.is_due(step + 1) or meter.finiteness.is_exhausted:
            meter.flush(step=step + 1, epoch=epoch + 1)
            if step + 1 < last and (meter.stop_agreed or keeper.is_due(step + 1)):  # an epoch's end has its own
                check_weights(setup, step=step + 1)
                mark(Phase.SAVING)
                keeper.save(step=step + 1)
                if meter.stop_agreed:
                    raise Stopped
                meter.clock.resume()


def end_epoch(setup: Setup, *, epoch: int, meter: Meter, keeper: Keeper) -> None:
    """Evaluate if it is time to, move an epoch-wise scheduler on, and save."""
    last = epoch + 1 == setup.epochs
    step = setup.order.steps_per_epoch * (epoch + 1)
    check_weights(setup, step=step)
    values: dict[str, float] = {}
    if last or (epoch + 1) % setup.experiment.train.evaluate_every_epochs == 0:
        show = partial(announce.curve, setup=setup, outbox=meter.outbox) if last else None
        values = evaluate(setup, show=show)
        meter.send([Point(name, step, value) for name, value in values.items()], step=step, epoch=epoch + 1)
        if values:
            meter.finiteness.judge_validation(values["validation/loss"], step=step, epoch=epoch + 1)
    if setup.scheduler is not None and setup.experiment.train.scheduler_interval == "epoch":
        if not isinstance(setup.scheduler, ReduceLROnPlateau):
            setup.scheduler.step()
        elif values:
            setup.scheduler.step(values["validation/loss"])
    mark(Phase.SAVING)
    keeper.save(step=step, metric=values.get(setup.experiment.checkpoint.best or ""))

"""The training loop, from top to bottom.

Every rank runs this code on its share of each global batch; nothing here depends on who started the process.
"""

from itertools import chain

from torch.optim.lr_scheduler import ReduceLROnPlateau

from pipeline.contract import Rank, Trial, TrialResult
from pipeline.events import Outbox, Point
from pipeline.training import announce
from pipeline.training.clock import Clock, spread
from pipeline.training.collective import gather
from pipeline.training.evaluation import evaluate
from pipeline.training.gauge import GpuGauge
from pipeline.training.meter import Meter
from pipeline.training.probe import probe, unused_parameters
from pipeline.training.setup import Setup, build
from pipeline.training.step import optimizer_step


def train(trial: Trial, *, rank: Rank, outbox: Outbox) -> TrialResult:
    """Run a trial on this rank. All ranks return the same result; rank 0 reports on the way.

    Raises:
        ExperimentError: the experiment can't be trained as it is written.
        TrainingError: training failed, e.g. the loss is not finite.
    """
    setup = build(trial, rank=rank)
    clock = Clock(device=setup.device, warmup_steps=trial.experiment.measure.warmup_steps)
    meter = Meter(trial=trial, rank=rank, order=setup.order, clock=clock, gauge=GpuGauge(setup.gpus), outbox=outbox)
    announce.start(setup, outbox)
    for epoch in range(setup.epochs):
        train_epoch(setup, epoch=epoch, meter=meter)
        if not trial.is_measurement:
            end_epoch(setup, epoch=epoch, meter=meter)
    if not trial.is_measurement:
        announce.model(setup, outbox)
    memory = announce.peak_memory_mb(setup)
    return TrialResult(
        trial=trial.name,
        repeat=trial.repeat,
        steps=setup.steps,
        samples_per_second=spread([lap.samples_per_second for lap in clock.steady]),
        step_ms=spread([lap.step_ms for lap in clock.steady]),
        parts=probe(setup, step_ms=clock.steady[0].step_ms),
        peak_memory_mb=memory,
        gpu_utilization=tuple(chain.from_iterable(gather(meter.gauge.means(), rank=rank))),
        gradient_mb=announce.gradient_mb(setup.model),
        unused_parameters=unused_parameters(setup),
        coupling=announce.coupling_layers(setup.model),
        losses=meter.first_losses,
        metrics=meter.latest,
    )


def train_epoch(setup: Setup, *, epoch: int, meter: Meter) -> None:
    """Train one epoch (counted from 0), or what is left of the trial's steps."""
    setup.wrapped.train()
    first = epoch * setup.order.steps_per_epoch
    stream = setup.train_loader.batches(setup.draws(epoch))
    meter.clock.resume()
    for step in range(first, min(first + setup.order.steps_per_epoch, setup.steps)):
        loss, norm, rate = optimizer_step(setup, stream, step=step)
        meter.add(loss, norm=norm, rate=rate, samples=setup.order.batch_size(step - first))
        if step == 0:
            announce.first_step(setup, meter.outbox)
        if setup.is_report_due(step + 1):
            meter.flush(step=step + 1, epoch=epoch + 1)


def end_epoch(setup: Setup, *, epoch: int, meter: Meter) -> None:
    """Evaluate if it is time to, and move an epoch-wise scheduler on."""
    last = epoch + 1 == setup.epochs
    values: dict[str, float] = {}
    if last or (epoch + 1) % setup.experiment.train.evaluate_every_epochs == 0:
        values = evaluate(setup)
        step = setup.order.steps_per_epoch * (epoch + 1)
        meter.send([Point(name, step, value) for name, value in values.items()], step=step, epoch=epoch + 1)
    if setup.scheduler is not None and setup.experiment.train.scheduler_interval == "epoch":
        if not isinstance(setup.scheduler, ReduceLROnPlateau):
            setup.scheduler.step()
        elif values:
            setup.scheduler.step(values["validation/loss"])

"""The training loop, from top to bottom.

Every rank runs this code on its share of each global batch; nothing here depends on who started the process.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pipeline.contract import Rank, Trial, TrialResult
from pipeline.errors import ExperimentError
from pipeline.events import Outbox, Point
from pipeline.training import announce
from pipeline.training.clock import Clock, spread
from pipeline.training.evaluation import evaluate
from pipeline.training.learning_rate import warmup_factor
from pipeline.training.loader import to_device
from pipeline.training.meter import Meter
from pipeline.training.order import Draw, mix
from pipeline.training.probe import probe
from pipeline.training.setup import Setup, build

Stream = Iterator[tuple[Draw, Any]]


def train(trial: Trial, *, rank: Rank, outbox: Outbox) -> TrialResult:
    """Run a trial on this rank. All ranks return the same result; rank 0 reports on the way.

    Raises:
        ExperimentError: the experiment can't be trained as it is written.
        TrainingError: training failed, e.g. the loss is not finite.
    """
    setup = build(trial, rank=rank)
    clock = Clock(device=setup.device, warmup_steps=trial.experiment.measure.warmup_steps)
    meter = Meter(trial=trial.name, rank=rank, order=setup.order, clock=clock, outbox=outbox)
    announce.start(setup, outbox)
    for epoch in range(setup.epochs):
        train_epoch(setup, epoch=epoch, meter=meter)
        if not trial.is_measurement:
            end_epoch(setup, epoch=epoch, meter=meter)
    if not trial.is_measurement:
        announce.model(setup, outbox)
    waits = probe(setup, step_ms=clock.steady[0].step_ms)
    return TrialResult(
        trial=trial.name,
        steps=setup.steps,
        samples_per_second=spread([lap.samples_per_second for lap in clock.steady]),
        step_ms=spread([lap.step_ms for lap in clock.steady]),
        exposed_communication_ms=waits.exposed_communication_ms,
        data_wait_ms=waits.data_wait_ms,
        peak_memory_mb=announce.peak_memory_mb(setup),
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


def optimizer_step(setup: Setup, stream: Stream, *, step: int) -> tuple[Tensor, Tensor | None, float]:
    """One optimizer step, counted from 0, on this rank's next micro-batches.

    Returns this rank's part of the global batch's mean loss (scalar, on the device), the gradient norm before
    clipping if it is clipped, and the learning rate.
    """
    # Dropout and the like draw from here: the same in a resumed step, different on each rank.
    _seed(mix(setup.experiment.seed, "step", step, setup.rank.rank), device=setup.device)
    total = torch.zeros((), device=setup.device, dtype=setup.input_dtype)
    for draw, batch in stream:
        # All micro-batches but the last keep their gradients to themselves: one exchange a step, not one each.
        with nullcontext() if draw.is_last else setup.strategy.accumulate(setup.wrapped):
            loss = forward(setup, batch)
            # Weighted by its share of the global batch, the sum over micro-batches and ranks is the global mean.
            setup.scaler.scale(loss * (draw.weight * setup.strategy.gradient_scale)).backward()  # type: ignore[no-untyped-call]
        total += loss.detach() * draw.weight
        if draw.is_last:
            break
    norm = _clip(setup)
    scale = setup.scaler.get_scale()
    rate = _step_optimizer(setup, step=step)
    skipped = setup.scaler.get_scale() < scale  # fp16: gradients overflowed, so the optimizer did nothing
    if setup.scheduler is not None and setup.experiment.train.scheduler_interval == "step" and not skipped:
        setup.scheduler.step()
    return total, norm, rate


def forward(setup: Setup, batch: Any) -> Tensor:
    """The mean loss of a micro-batch (scalar), with its graph."""
    with setup.autocast():
        loss = setup.task(setup.wrapped, to_device(batch, device=setup.device, dtype=setup.input_dtype)).loss
    if loss.ndim:
        raise ExperimentError.of(
            "task" if setup.experiment.task else "loss",
            f"returned a tensor of shape {tuple(loss.shape)}; it must be a scalar, the mean over the samples",
        )
    return loss


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


def _seed(seed: int, *, device: torch.device) -> None:
    """As torch.manual_seed, which formats a stack trace for each kind of device that is not there."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)


def _clip(setup: Setup) -> Tensor | None:
    if (limit := setup.experiment.train.clip_grad_norm) is None:
        return None
    setup.scaler.unscale_(setup.optimizer)
    return clip_grad_norm_(setup.model.parameters(), limit)


def _step_optimizer(setup: Setup, *, step: int) -> float:
    """Step with the warm-up's learning rate, which works with any scheduler since it leaves no trace in it."""
    train = setup.experiment.train
    factor = warmup_factor(train.lr_scaling, step=step, global_batch_size=train.global_batch_size)
    scheduled = [group["lr"] for group in setup.optimizer.param_groups]
    for group in setup.optimizer.param_groups:
        group["lr"] = group["lr"] * factor
    setup.scaler.step(setup.optimizer)
    setup.scaler.update()
    setup.optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(setup.optimizer.param_groups, scheduled, strict=True):
        group["lr"] = rate
    return float(scheduled[0] * factor)

"""One optimizer step, from top to bottom: forward, backward, exchange, clip, step."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from pipeline.errors import ExperimentError
from pipeline.training.learning_rate import warmup_factor
from pipeline.training.loader import to_device
from pipeline.training.order import Draw, mix
from pipeline.training.setup import Setup

Stream = Iterator[tuple[Draw, Any]]
"""A rank's micro-batches, in order."""


def optimizer_step(setup: Setup, stream: Stream, *, step: int) -> tuple[Tensor, Tensor | None, float]:
    """One optimizer step, counted from 0, on this rank's next micro-batches.

    Returns this rank's part of the global batch's mean loss (scalar, on the device), the gradient norm before
    clipping if it is clipped, and the learning rate.
    """
    # Dropout and the like draw from here: the same in a resumed step, different on each rank.
    _seed(mix(setup.experiment.seed, "step", step, setup.rank.rank), device=setup.device)
    total = gradients(setup, stream)
    norm = _clip(setup)
    scale = setup.scaler.get_scale()
    rate = _step_optimizer(setup, step=step)
    skipped = setup.scaler.get_scale() < scale  # fp16: gradients overflowed, so the optimizer did nothing
    if setup.scheduler is not None and setup.experiment.train.scheduler_interval == "step" and not skipped:
        setup.scheduler.step()
    return total, norm, rate


def gradients(setup: Setup, stream: Stream, *, exchange: bool = True) -> Tensor:
    """Forward and backward of one step's micro-batches; the gradients are left in the model.

    Without ``exchange`` each rank keeps its own gradients. Returns this rank's part of the global batch's mean loss.
    """
    total = torch.zeros((), device=setup.device, dtype=setup.input_dtype)
    for draw, batch in stream:
        # All micro-batches but the last keep their gradients to themselves: one exchange a step, not one each.
        with nullcontext() if draw.is_last and exchange else setup.strategy.accumulate(setup.wrapped):
            loss = forward(setup, batch)
            # Weighted by its share of the global batch, the sum over micro-batches and ranks is the global mean.
            setup.scaler.scale(loss * (draw.weight * setup.strategy.gradient_scale)).backward()  # type: ignore[no-untyped-call]
        total += loss.detach() * draw.weight
        if draw.is_last:
            break
    return total


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

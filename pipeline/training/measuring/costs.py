"""Costs of a step, from which scaling is predicted: compute and loading by batch size, gradients, all-reduces.

Variants are measured alternately (A B C A B C ...), so that drift affects all equally, and reduced to medians; with
several ranks, the slowest counts. Only the model's buffers change, and they are restored.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from statistics import median
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipeline.errors import ExperimentError
from pipeline.protocol.progress import ProgressReporter
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial_result import AllReduce, BatchCost, Costs, Gradient
from pipeline.training.context import TrainContext
from pipeline.training.meters.clock import synchronize
from pipeline.training.ranks.collectives import barrier, gather
from pipeline.training.step.dry_run import forget_local_steps, held_step, without_updates
from pipeline.training.step.forward import forward

BUDGET_SECONDS = 2.5  # for each kind of measurement
ROUNDS, FEWEST_ROUNDS = 15, 3
SMALLEST_BYTES, LARGEST_BYTES, SIZES = 4 * 2**10, 32 * 2**20, 6
LARGEST_AT_LEAST = 2**20  # else small models would say nothing about bandwidth

Key = TypeVar("Key")
Measured = TypeVar("Measured")


class _Pass(NamedTuple):
    """Milliseconds of loading, the forward pass and the backward pass."""

    data: float
    forward: float
    backward: float


def costs(context: TrainContext) -> Costs:
    """Measure the parts of a trial's steps. Collective; takes some seconds.

    Raises:
        ExperimentError: the data is a stream, or has fewer samples than a global batch; the task gathers them.
    """
    if context.seen.gathers:
        raise ExperimentError.of(
            "task",
            "calls pipeline.tasks.gathered, so that each worker compares all samples of a global batch. The cost of "
            "this on more workers can't be predicted. Remove --predict.",
        )
    if context.order.is_stream:
        raise ExperimentError.of(
            "data",
            f"{context.experiment.data.target} is iterable, so other batch sizes can't be timed for a "
            "prediction. Remove --predict, or use a map-style dataset such as pipeline.data.arrays.",
        )
    if context.order.samples < context.order.global_batch_size:
        raise ExperimentError.of(
            "data",
            f"an epoch has {context.order.samples} samples, fewer than the global batch of "
            f"{context.order.global_batch_size}, so no step can be measured; lower train.global_batch_size",
        )
    rank = context.rank
    with without_updates(context):
        measured = Costs(
            curve=_curve(context),
            gradients=gradients(context.model),
            buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in context.model.buffers()),
            all_reduces=all_reduces(context.model, rank=rank, device=context.device) if rank.world_size > 1 else (),
            world_size=rank.world_size,
        )
        forget_local_steps(context, held_step(context))
        return measured


def gradients(model: nn.Module) -> tuple[Gradient, ...]:
    """Return the gradients in the order of backward, whose time is spread evenly over the matrices among them.

    Vectors, such as biases and scales, take none. Measured on convolutional networks and transformers this is closer
    than a spread by size: a network's last layers often have most of the parameters and little of the time.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad][::-1]
    done = list(accumulate(parameter.ndim > 1 for parameter in parameters))
    return tuple(
        Gradient(bytes=parameter.numel() * parameter.element_size(), ready=count / done[-1] if done[-1] else 1.0)
        for parameter, count in zip(parameters, done, strict=True)
    )


def all_reduces(model: nn.Module, *, rank: Rank, device: torch.device) -> tuple[AllReduce, ...]:
    """Time all-reduces over all ranks, from 4 KiB to the size of all gradients; the slowest rank counts. Collective."""
    size = sum(gradient.bytes for gradient in gradients(model))
    largest = min(LARGEST_BYTES, max(LARGEST_AT_LEAST, size))
    step = (largest / SMALLEST_BYTES) ** (1 / (SIZES - 1))
    tensors = [
        torch.zeros(round(SMALLEST_BYTES * step**i) // 4, dtype=torch.float32, device=device) for i in range(SIZES)
    ]

    def exchange(tensor: torch.Tensor) -> float:
        start = time.perf_counter()
        dist.all_reduce(tensor)
        synchronize(device)
        return 1e3 * (time.perf_counter() - start)

    times = _alternate({4 * len(tensor): partial(exchange, tensor) for tensor in tensors}, rank=rank, what="the link")
    ranks = gather(times, rank=rank)
    slowest = {size: map(max, zip(*(times[size] for times in ranks), strict=True)) for size in times}
    return tuple(AllReduce(bytes=size, ms=median(rounds)) for size, rounds in slowest.items())


def _alternate(variants: Mapping[Key, Callable[[], Measured]], *, rank: Rank, what: str) -> dict[Key, list[Measured]]:
    """Run the variants alternately in several rounds and return each variant's results. Collective.

    Ranks start each variant together. ``what`` names the measurement in the terminal.
    """
    seconds = 0.0
    for _ in range(2):  # the first round is cold
        barrier(rank)
        start = time.perf_counter()
        for measure in variants.values():
            measure()
        seconds = max(gather(time.perf_counter() - start, rank=rank))
    results: dict[Key, list[Measured]] = {key: [] for key in variants}
    rounds = max(FEWEST_ROUNDS, min(ROUNDS, int(BUDGET_SECONDS / seconds)))
    with ProgressReporter(f"measuring {what}", total=rounds, unit="rounds", silent=not rank.is_first) as progress:
        for done in range(rounds):
            for key, measure in variants.items():
                barrier(rank)
                results[key].append(measure())
            progress.to(done + 1)
    return results


def _curve(context: TrainContext) -> tuple[BatchCost, ...]:
    """Measure loading and computing of a rank's micro-batch, and without other ranks also at smaller sizes."""
    largest = _micro_batch(context)
    sizes = [largest]
    if context.rank.world_size == 1:
        sizes = sorted({_smallest(context), -(-largest // 2), largest})
    times = _alternate({size: partial(_timed, context, size=size) for size in sizes}, rank=context.rank, what="batches")
    ranks = gather(times, rank=context.rank)
    return tuple(_cost(size, [times[size] for times in ranks]) for size in sizes)


def _cost(size: int, ranks: Sequence[Sequence[_Pass]]) -> BatchCost:
    """Return the cost of a batch size on the slowest rank, from the passes of all ranks in each round."""
    medians = [_Pass(*map(median, zip(*passes, strict=True))) for passes in ranks]
    data, ahead, back = map(max, zip(*medians, strict=True))
    return BatchCost(samples=size, forward_ms=ahead, backward_ms=back, data_ms=data)


def _micro_batch(context: TrainContext) -> int:
    """Return the samples in a rank's largest micro-batch."""
    share = -(-context.order.global_batch_size // context.rank.world_size)
    return -(-share // min(share, context.accumulation))


def _indices(context: TrainContext, count: int) -> list[int]:
    """Return the first samples, again from the start if the training set has fewer than an epoch."""
    return [index % context.order.set_size for index in range(count)]


def _smallest(context: TrainContext) -> int:
    """Return the fewest samples that a forward pass takes: batch norm may need two."""
    return min(_micro_batch(context), 2 if any(isinstance(m, _BatchNorm) for m in context.model.modules()) else 1)


def _timed(context: TrainContext, *, size: int) -> _Pass:
    """Time loading a batch, and its forward and backward pass without exchange."""
    start = time.perf_counter()
    batch = context.batches.read(_indices(context, size))
    data_s = time.perf_counter() - start
    batch = context.batches.copy_to_device(batch)  # which training does during the step before
    synchronize(context.device)
    instants = [time.perf_counter()]
    with context.strategy.no_sync(context.wrapped):
        loss = forward(context, context.wrapped, batch).loss * context.strategy.gradient_scale
        synchronize(context.device)
        instants.append(time.perf_counter())
        context.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
    synchronize(context.device)
    instants.append(time.perf_counter())
    context.optimizer.zero_grad(set_to_none=True)
    ahead, back = (1e3 * (after - before) for before, after in pairwise(instants))
    return _Pass(1e3 * data_s, ahead, back)

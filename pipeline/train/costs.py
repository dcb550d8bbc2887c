"""Costs of a step, from which scaling is predicted: compute and loading by batch size, gradients, all-reduces.

Variants are measured alternately (A B C A B C ...), so that drift affects all equally, and reduced to medians; with
several ranks, the slowest counts. Only the model's buffers change, and they are restored.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate, pairwise
from statistics import median
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipeline.errors import ExperimentError
from pipeline.protocol.progress import ProgressReporter
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial_result import AllReduce, BatchCost, Costs, Gradient
from pipeline.train.kept import clear_gradients, forget_local_steps, held_step, suspend_updates
from pipeline.train.ranks import barrier, gather, synchronize
from pipeline.train.state import State

BUDGET_SECONDS = 2.5  # for each kind of measurement
ROUNDS, FEWEST_ROUNDS = 15, 3
SMALLEST_BYTES, LARGEST_BYTES, SIZES = 4 * 2**10, 32 * 2**20, 6
LARGEST_AT_LEAST = 2**20  # else small models would say nothing about bandwidth

Key = TypeVar("Key")
T = TypeVar("T")


def costs(s: State) -> Costs:
    """Measure the parts of a trial's steps. Collective; takes some seconds.

    Raises:
        ExperimentError: the data is a stream, or has fewer samples than a global batch; the task gathers them.
    """
    if s.facts is not None and s.facts.gathers:
        raise ExperimentError.of(
            "task",
            "calls pipeline.tasks.gathered, so that each worker compares all samples of a global batch. The cost of "
            "this on more workers can't be predicted. Remove --predict.",
        )
    if s.order.is_stream:
        raise ExperimentError.of(
            "data",
            f"{s.experiment.data.target} is iterable, so other batch sizes can't be timed for a "
            "prediction. Remove --predict, or use a map-style dataset such as pipeline.data.arrays.",
        )
    if s.order.samples < s.order.global_batch_size:
        raise ExperimentError.of(
            "data",
            f"an epoch has {s.order.samples} samples, fewer than the global batch of "
            f"{s.order.global_batch_size}, so no step can be measured; lower train.global_batch_size",
        )
    with suspend_updates(s):
        measured = Costs(
            curve=_measure_curve(s),
            gradients=gradients(s.trainee),
            buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in s.trainee.buffers()),
            all_reduces=all_reduces(s.trainee, rank=s.rank, device=s.device) if s.rank.world_size > 1 else (),
            world_size=s.rank.world_size,
        )
        forget_local_steps(s, held_step(s))
        return measured


def gradients(module: nn.Module) -> tuple[Gradient, ...]:
    """Return the gradients in the order of backward, whose time is spread evenly over the matrices among them.

    On convolutional networks and transformers this is closer than a spread by size: a network's last layers often have
    most of the parameters and little of the time.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad][::-1]
    done = list(accumulate(parameter.ndim > 1 for parameter in parameters))
    return tuple(
        Gradient(bytes=parameter.numel() * parameter.element_size(), ready=count / done[-1] if done[-1] else 1.0)
        for parameter, count in zip(parameters, done, strict=True)
    )


def all_reduces(module: nn.Module, *, rank: Rank, device: torch.device) -> tuple[AllReduce, ...]:
    """Time all-reduces over all ranks, from 4 KiB to the size of all gradients; the slowest rank counts. Collective."""
    size = sum(gradient.bytes for gradient in gradients(module))
    largest = min(LARGEST_BYTES, max(LARGEST_AT_LEAST, size))
    factor = (largest / SMALLEST_BYTES) ** (1 / (SIZES - 1))
    tensors = [torch.zeros(round(SMALLEST_BYTES * factor**i) // 4, device=device) for i in range(SIZES)]

    def exchange(tensor: Tensor) -> float:
        start = time.perf_counter()
        dist.all_reduce(tensor)
        synchronize(device)
        return 1e3 * (time.perf_counter() - start)

    times = _alternate({4 * len(tensor): partial(exchange, tensor) for tensor in tensors}, rank=rank, what="the link")
    ranks = gather(times, rank=rank)
    slowest = {size: map(max, zip(*(times[size] for times in ranks), strict=True)) for size in times}
    return tuple(AllReduce(bytes=size, ms=median(rounds)) for size, rounds in slowest.items())


def alternate(variants: Mapping[Key, Callable[[], T]], *, rank: Rank, rounds: int, what: str) -> dict[Key, list[T]]:
    """Run the variants alternately, each started by all ranks together, and return each one's results by round."""
    results: dict[Key, list[T]] = {key: [] for key in variants}
    with ProgressReporter(f"measuring {what}", total=rounds, unit="rounds", silent=not rank.is_first) as progress:
        for _ in range(rounds):
            for key, measure in variants.items():
                barrier(rank)
                results[key].append(measure())
            progress.by(1)
    return results


def _alternate(variants: Mapping[Key, Callable[[], T]], *, rank: Rank, what: str) -> dict[Key, list[T]]:
    """Run the variants in as many rounds as there is time for."""
    for _ in range(2):  # the first round is cold
        barrier(rank)
        start = time.perf_counter()
        for measure in variants.values():
            measure()
    seconds = max(gather(time.perf_counter() - start, rank=rank))
    rounds = max(FEWEST_ROUNDS, min(ROUNDS, int(BUDGET_SECONDS / seconds)))
    return alternate(variants, rank=rank, rounds=rounds, what=what)


def _measure_curve(s: State) -> tuple[BatchCost, ...]:
    """Measure loading and computing of a rank's micro-batch, and without other ranks also at smaller sizes."""
    share = -(-s.order.global_batch_size // s.rank.world_size)
    largest = -(-share // min(share, s.accumulation))
    sizes = [largest]
    if s.rank.world_size == 1:
        has_norms = any(isinstance(module, _BatchNorm) for module in s.trainee.modules())  # which may need two samples
        sizes = sorted({min(largest, 2 if has_norms else 1), -(-largest // 2), largest})
    times = _alternate({size: partial(_time_batch, s, size) for size in sizes}, rank=s.rank, what="batches")
    ranks, curve = gather(times, rank=s.rank), []
    for size in sizes:
        medians = ([median(each) for each in zip(*own[size], strict=True)] for own in ranks)
        data, forward, backward = map(max, zip(*medians, strict=True))
        curve.append(BatchCost(samples=size, forward_ms=forward, backward_ms=backward, data_ms=data))
    return tuple(curve)


def _time_batch(s: State, size: int) -> tuple[float, float, float]:
    """Return the milliseconds of loading a batch, and of its forward and backward pass without exchange."""
    instants = [time.perf_counter()]

    def note() -> None:
        synchronize(s.device)
        instants.append(time.perf_counter())

    # The first samples, again from the start if the training set has fewer than an epoch.
    batch = s.batches.read([index % s.order.set_size for index in range(size)])
    note()
    batch = s.batches.place(batch)  # which training does during the step before
    note()
    with s.strategy.no_sync(s.wrapped):
        losses: list[Tensor] = []
        with s.autocast():
            if s.experiment.optimizers:
                s.trainee.with_updates(batch, lambda _, loss: losses.append(loss))
            else:
                losses.append(s.wrapped(batch).sum / size)
            loss = torch.stack(losses).sum()
        note()
        s.scaler.scale(loss * s.strategy.gradient_scale).backward()  # type: ignore[no-untyped-call]
    note()
    clear_gradients(s)
    data, _, forward, backward = (1e3 * (end - start) for start, end in pairwise(instants))
    return data, forward, backward

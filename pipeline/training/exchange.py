"""Costs of exchanging gradients, for predictions: when each gradient is ready, and how long all-reduces take."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.protocol.progress import ProgressReporter
from pipeline.protocol.trial import Rank
from pipeline.protocol.trial_result import AllReduce, Gradient
from pipeline.training.clock import Instant, synchronize
from pipeline.training.collectives import barrier, gather

BUDGET_SECONDS = 2.5  # for each kind of measurement
ROUNDS, FEWEST_ROUNDS = 15, 3
SMALLEST_BYTES, LARGEST_BYTES, SIZES = 4 * 2**10, 32 * 2**20, 6
LARGEST_AT_LEAST = 2**20  # else small models would say nothing about bandwidth
PASSES = 5

Key = TypeVar("Key")
Measured = TypeVar("Measured")


def in_turn(variants: Mapping[Key, Callable[[], Measured]], *, rank: Rank, what: str) -> dict[Key, list[Measured]]:
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


def all_reduces(model: nn.Module, *, rank: Rank, device: torch.device) -> tuple[AllReduce, ...]:
    """Time all-reduces over all ranks, from 4 KiB to the size of all gradients; the slowest rank counts. Collective."""
    gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    largest = min(LARGEST_BYTES, max(LARGEST_AT_LEAST, gradients))
    step = (largest / SMALLEST_BYTES) ** (1 / (SIZES - 1))
    tensors = [
        torch.zeros(round(SMALLEST_BYTES * step**i) // 4, dtype=torch.float32, device=device) for i in range(SIZES)
    ]

    def exchange(tensor: torch.Tensor) -> float:
        start = time.perf_counter()
        dist.all_reduce(tensor)
        synchronize(device)
        return 1e3 * (time.perf_counter() - start)

    times = in_turn({4 * len(tensor): partial(exchange, tensor) for tensor in tensors}, rank=rank, what="the link")
    ranks = gather(times, rank=rank)
    slowest = {size: tuple(map(max, zip(*(rank[size] for rank in ranks), strict=True))) for size in times}
    return tuple(AllReduce(bytes=size, ms=median(rounds), rounds_ms=rounds) for size, rounds in slowest.items())


Backward = Callable[[Callable[[], object]], object]
"""Function that runs a forward and a backward pass, and calls its argument in between."""


def gradients(model: nn.Module, backward: Backward, *, device: torch.device) -> tuple[Gradient, ...]:
    """Measure each gradient's size and the fraction of the backward pass after which it is ready; leave none behind."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad][::-1]
    _cold, *passes = [_readiness(parameters, backward, device=device) for _ in range(PASSES + 1)]
    return tuple(
        Gradient(bytes=parameter.numel() * parameter.element_size(), ready=median(ready))
        for parameter, ready in zip(parameters, zip(*passes, strict=True), strict=True)
    )


def _readiness(parameters: list[nn.Parameter], backward: Backward, *, device: torch.device) -> list[float]:
    """Return the fraction of a backward pass after which each gradient is ready; 1 for unused parameters."""
    marks: dict[int, Instant] = {}

    def note(number: int, _: Tensor | None = None) -> None:
        marks[number] = Instant(device)

    hooks = [
        parameter.register_post_accumulate_grad_hook(partial(note, number))  # type: ignore[no-untyped-call]
        for number, parameter in enumerate(parameters)
    ]
    try:
        backward(lambda: note(-1))
        end = Instant(device)
        synchronize(device)
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in parameters:
            parameter.grad = None
    whole = end.since(marks[-1])
    return [marks.get(number, end).since(marks[-1]) / whole for number in range(len(parameters))]

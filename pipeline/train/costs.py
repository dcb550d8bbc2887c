"""Costs of a step: its floating-point operations, and what a prediction of scaling needs.

torch's FlopCounterMode counts matrix products, convolutions and attention once, after the training, in a step without
gradient exchange and update, on a batch in memory. Compiled parts run uncompiled meanwhile, since the counter can't see
into their kernels.

Scaling is predicted from compute and loading by batch size, gradients, and all-reduces. They are measured alternately
(A B C A B C ...), so that drift affects all equally, and reduced to medians; with several ranks, the slowest counts.
"""

import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import accumulate, pairwise
from statistics import median
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode  # torch's notes on extending it name this module
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from pipeline.errors import ExperimentError
from pipeline.protocol.progress import ProgressReporter
from pipeline.protocol.trial import Rank
from pipeline.protocol.trial_result import AllReduce, BatchCost, Costs, Flops, Gradient
from pipeline.train.kept import (
    HeldStep,
    clear_gradients,
    compute_gradients,
    forget_local_steps,
    held_step,
    keep_buffers,
    suspend_updates,
)
from pipeline.train.ranks import TF32_CAPABILITY, barrier, gather, matmul_precision, synchronize
from pipeline.train.state import State
from pipeline.wording import first_line

BUDGET_SECONDS = 2.5  # for each kind of measurement
ROUNDS, FEWEST_ROUNDS = 15, 3
SMALLEST_BYTES, LARGEST_BYTES, SIZES = 4 * 2**10, 32 * 2**20, 6
LARGEST_AT_LEAST = 2**20  # else small models would say nothing about bandwidth
_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_TORCHS_OWN = {"aten", "prim", "prims", "c10d", "c10d_functional", "_c10d_functional", "fsdp", "profiler"}
_PRODUCTS = re.compile(
    r"rnn(?!_flatten)|fft|linalg_(?!vector_norm)|cdist|attention|conv(?!ert)|(^|_)(mm|bmm|addmm|mv|dot)($|_)"
)
"""Names of torch's operators that multiply matrices, with or without a formula in the counter."""
_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
_ON_CPU: dict[Any, Any] = {  # torch has formulas for attention on GPUs only
    getattr(torch.ops.aten, _FLASH): lambda *shapes, **_: sdpa_flop_count(*shapes[:3]),  # type: ignore[no-untyped-call]
    getattr(torch.ops.aten, f"{_FLASH}_backward"): lambda *shapes, **_: sdpa_backward_flop_count(*shapes[:4]),  # type: ignore[no-untyped-call]
}

Key = TypeVar("Key")
T = TypeVar("T")


def count_operations(s: State, held: HeldStep) -> Flops | None:
    """Count the operations of one step; None, with a warning, if that fails on any rank. Collective."""
    places, flops, operators, problems = zip(*gather((s.rank.place, *_count_flops(s, held)), rank=s.rank), strict=True)
    if any(problems):
        place, problem = next(each for each in zip(places, problems, strict=True) if each[1])
        where = f" on {place}" if s.rank.world_size > 1 else ""
        s.warn(f"could not count the FLOPs of a step{where}, so none are reported: {problem}", subject="measuring")
        return None
    forget_local_steps(s, held)
    total, uncounted = sum(flops, Counter[str]()), tuple(sorted(set().union(*operators)))
    if not total and not uncounted:
        return None
    samples = s.order.batch_size(0)
    return Flops(of_sample={name: each / samples for name, each in total.items()}, uncounted=uncounted)


def _count_flops(s: State, held: HeldStep) -> tuple[Counter[str], set[str], str]:
    """Return this rank's operations by arithmetic, operators without a formula, and why it could not be counted."""
    counter = FlopCounterMode(display=False, custom_mapping=_ON_CPU)
    tally, wrapped = _Tally(s, counter), s.wrapped
    if s.strategy.devices == "all":  # DataParallel's threads would leave the counter
        s.wrapped = s.trainee
    # Importing the compiler takes seconds.
    uncompiled = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    s.wrapped.train()
    try:
        with keep_buffers(s.trainee), uncompiled, counter, tally:
            compute_gradients(s, iter(held), exchange=False)
    except Exception as error:  # noqa: BLE001 - code of the experiment, which runs under a dispatch mode here
        return Counter(), set(), first_line(error)
    finally:
        clear_gradients(s)
        s.wrapped = wrapped
    return tally.flops, tally.uncounted, ""


class _Tally(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums of a counter by arithmetic, and the operators that it has no formula for."""

    supports_higher_order_operators = True

    def __init__(self, s: State, counter: FlopCounterMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: Counter[str] = Counter()
        self.uncounted: set[str] = set()
        self._counter = counter
        self._recomputes = s.experiment.train.activation_checkpointing is not False
        is_able = s.device.type == "cuda" and torch.cuda.get_device_capability(s.device) >= TF32_CAPABILITY
        self._tf32_products = is_able and matmul_precision() != "highest"
        self._tf32_convolutions = is_able and torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator under the counter, and take over what it counts."""
        before = self._counter.get_total_flops()
        result = func(*args, **(kwargs or {}))
        flops = self._counter.get_total_flops() - before
        namespace, _, name = func.name().partition("::")
        if not flops and (namespace not in _TORCHS_OWN or _PRODUCTS.search(name.partition(".")[0])):
            self.uncounted.add(func.name().partition(".")[0])
        # A forward pass that activation checkpointing repeats is not counted as work of the model.
        is_repeated = self._recomputes and self._counter.mod_tracker.is_bw and torch.is_grad_enabled()
        if flops and not is_repeated:
            dtype = next(value.dtype for value in args if isinstance(value, Tensor))
            has_tf32 = self._tf32_convolutions if "conv" in name else self._tf32_products
            arithmetic = "tf32" if dtype == torch.float32 and has_tf32 else _NAMES.get(dtype, str(dtype)[6:])
            self.flops[arithmetic] += flops
        return result


def costs(s: State) -> Costs:
    """Measure the parts of a trial's steps. Collective; takes some seconds."""
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

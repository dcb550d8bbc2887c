"""Floating-point operations of a step: matrix products, convolutions and attention, forward and backward.

torch's FlopCounterMode counts them once, after the training, in a step without gradient exchange and update, on a batch
in memory. Compiled parts run uncompiled meanwhile, since the counter can't see into their kernels.
"""

import re
import sys
from collections import Counter
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # torch's notes on extending it name this module
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from pipeline.protocol.trial_result import Flops
from pipeline.train.kept import HeldStep, clear_gradients, compute_gradients, forget_local_steps, keep_buffers
from pipeline.train.ranks import TF32_CAPABILITY, gather, matmul_precision
from pipeline.train.state import State
from pipeline.wording import first_line

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


def count(s: State, held: HeldStep) -> Flops | None:
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

"""Floating-point operations of a step: matrix products, convolutions and attention, forward and backward.

torch's FlopCounterMode counts them once, after the training, in a step without gradient exchange and update, on a batch
in memory. Compiled parts run uncompiled meanwhile, since the counter can't see into their kernels.
"""

import re
import sys
import time
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # torch's notes on extending it name this module
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from pipeline.protocol.events import Outbox, Warned
from pipeline.protocol.trial_result import Flops
from pipeline.training.buffers import Buffers
from pipeline.training.collectives import gather
from pipeline.training.context import TrainContext
from pipeline.training.dry_run import HeldStep, forget_local_steps
from pipeline.training.matmul_precision import TF32_CAPABILITY, matmul_precision
from pipeline.training.step import compute_gradients
from pipeline.wording import first_line

_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_TORCHS_OWN = {"aten", "prim", "prims", "c10d", "c10d_functional", "_c10d_functional", "fsdp", "profiler"}
_PRODUCTS = re.compile(
    r"rnn(?!_flatten)|fft|linalg_(?!vector_norm)|cdist|attention|conv(?!ert)|(^|_)(mm|bmm|addmm|mv|dot)($|_)"
)
"""Names of torch's operators that multiply matrices, with or without a formula in the counter."""
_aten = torch.ops.aten


def count(context: TrainContext, held: HeldStep, *, outbox: Outbox) -> Flops | None:
    """Count the operations of one step; None, with a warning, if that fails on any rank. Collective."""
    places, ranks = zip(*gather((context.rank.place, _counted(context, held)), rank=context.rank), strict=True)
    if problems := [(place, counted.problem) for place, counted in zip(places, ranks, strict=True) if counted.problem]:
        if context.rank.is_first:
            where = f" on {problems[0][0]}" if context.rank.world_size > 1 else ""
            message = f"could not count the FLOPs of a step{where}, so none are reported: {problems[0][1]}"
            outbox.event(Warned(time=time.time(), trial=context.trial.name, message=message, subject="measuring"))
        return None
    forget_local_steps(context, held)
    total = sum((counted.flops for counted in ranks), Counter[str]())
    uncounted = tuple(sorted({name for counted in ranks for name in counted.uncounted}))
    if not total and not uncounted:
        return None
    samples = context.order.batch_size(0)
    return Flops(of_sample={name: flops / samples for name, flops in total.items()}, uncounted=uncounted)


def _attention(*shapes: Any, **_: Any) -> int:
    return int(sdpa_flop_count(*shapes[:3]))  # type: ignore[no-untyped-call]


def _attention_backward(*shapes: Any, **_: Any) -> int:
    return int(sdpa_backward_flop_count(*shapes[:4]))  # type: ignore[no-untyped-call]


_ON_CPU = {  # torch has formulas for attention on GPUs only
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


class _Counted(NamedTuple):
    """Operations of one rank's step."""

    flops: Counter[str]
    """By arithmetic."""
    uncounted: frozenset[str] = frozenset()
    """Operators without a formula."""
    problem: str = ""
    """Why it could not be counted."""


def _counted(context: TrainContext, held: HeldStep) -> _Counted:
    if context.strategy.devices == "all":  # DataParallel's threads would leave the counter
        context = replace(context, built=context.built._replace(wrapped=context.model), assembled={})
    counter = FlopCounterMode(display=False, custom_mapping=_ON_CPU)
    tally = _Tally(context, counter)
    buffers = Buffers(context.whole)
    context.wrapped.train()
    try:
        with _uncompiled(), counter, tally:
            compute_gradients(context, iter(held), exchanges=False)
    except Exception as error:  # noqa: BLE001 - code of the experiment, which runs under a dispatch mode here
        return _Counted(Counter(), problem=first_line(error))
    finally:
        context.optimizer.zero_grad(set_to_none=True)
        buffers.restore()
    return _Counted(tally.flops, frozenset(tally.uncounted))


def _uncompiled() -> AbstractContextManager[object]:
    """Return a context in which compiled code runs as it was written; importing the compiler for it takes seconds."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


class _Tally(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums of a counter by arithmetic, and the operators that it has no formula for."""

    supports_higher_order_operators = True

    def __init__(self, context: TrainContext, counter: FlopCounterMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: Counter[str] = Counter()
        self.uncounted: set[str] = set()
        self._counter = counter
        self._recomputes = context.experiment.train.activation_checkpointing is not False
        is_able = context.device.type == "cuda" and torch.cuda.get_device_capability(context.device) >= TF32_CAPABILITY
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
        if flops and not self._is_repeated:
            self.flops[self._arithmetic(name, args)] += flops
        return result

    @property
    def _is_repeated(self) -> bool:
        """True in a forward pass that activation checkpointing repeats, which is no work of the model itself."""
        return self._recomputes and self._counter.mod_tracker.is_bw and torch.is_grad_enabled()

    def _arithmetic(self, name: str, args: Any) -> str:
        """Return the arithmetic of an operator by the type of its first tensor, e.g. "bf16"."""
        dtype = next(value.dtype for value in args if isinstance(value, Tensor))
        if dtype == torch.float32 and (self._tf32_convolutions if "conv" in name else self._tf32_products):
            return "tf32"
        return _NAMES.get(dtype, str(dtype).removeprefix("torch."))

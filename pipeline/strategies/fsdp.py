"""Fully sharded data parallel (torch's FSDP2): each rank keeps a shard of every parameter, gradient and moment.

The parameters of a group of modules are all-gathered before it computes and resharded afterwards; gradients are
reduce-scattered. Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv
1910.02054; Zhao et al. 2023, "PyTorch FSDP", arXiv 2304.11277.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from pipeline.config.values import Section
from pipeline.errors import ExperimentError
from pipeline.strategies import base
from pipeline.strategies._fsdp_groups import choose, describe

# Before torch 2.13: other names, no gradients of zero, no public reset.
_gather = cast(Any, getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)
_reduce_scatter = cast(Any, getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)
_SETS_ZEROS = hasattr(FSDPModule, "set_reduce_scatter_unused_params")


class Options(Section):
    """``parallel.options`` of fsdp."""

    groups: str | tuple[str, ...] = "auto"
    """Modules that are sharded and gathered as a unit: class names, none (the whole model), or auto.

    auto selects the class that is repeated in module lists or sequences and has the most parameters, such as a
    transformer block.
    """
    reshard_after_forward: Literal["auto"] | bool = "auto"
    """Free a group's parameters after forward and gather them again for backward; auto: all groups but the root."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory, and run the optimizer there (GPUs only)."""
    reduce_each_micro_batch: bool = False
    """With gradient accumulation, reduce after each micro-batch, so that no rank holds gradients of the whole model."""
    zero_unused_gradients: bool = False
    """Use a zero gradient for parameters that a rank doesn't use. Needed if ranks use different parameters."""


class Strategy(base.Sharded):
    """``fully_shard``, over NCCL on GPUs and gloo on CPU."""

    Options = Options
    processes = "many"
    needs_process_group = True
    _description = ""
    _groups: Sequence[nn.Module] = ()

    @override
    @classmethod
    def refuse(cls, options: Section, *, device: Literal["cpu", "cuda"]) -> str | None:
        if cast(Options, options).cpu_offload and device == "cpu":
            return "cpu_offload needs GPUs, since on the CPU all tensors are in host memory already; remove it"
        if cast(Options, options).zero_unused_gradients and not _SETS_ZEROS:
            return f"zero_unused_gradients needs torch 2.13, but {torch.__version__} is installed; upgrade or remove it"
        return None

    @override
    def wrap(self, model: nn.Module) -> nn.Module:
        options = cast(Options, self.options)
        if names := base.sparse_modules(model):
            raise ExperimentError.of(
                "model",
                f"{names[0]} has sparse gradients, which fsdp does not support; set sparse: false, or use ddp",
            )
        groups = choose(model, options.groups)
        self._groups = tuple(groups.values())
        self._description = describe(groups) if self.world_size > 1 else ""
        shard = partial(
            fully_shard,
            mesh=DeviceMesh.from_group(dist.group.WORLD, self.device.type),  # type: ignore[arg-type]
            reshard_after_forward=None if options.reshard_after_forward == "auto" else options.reshard_after_forward,
            offload_policy=CPUOffloadPolicy() if options.cpu_offload else OffloadPolicy(),
        )
        low, full = self._low_precision(), MixedPrecisionPolicy()
        for name, module in reversed(list(model.named_modules())):  # inner ones first
            if self.compute_dtype is not None and isinstance(module, _BatchNorm):
                shard(module, mp_policy=full)  # whose running statistics are in full precision
            elif name in groups:
                shard(module, mp_policy=low)
        shard(model, mp_policy=self._low_precision(output=torch.float32) if self.compute_dtype else full)
        self._exchange = _Exchange()
        for module in _sharded(model):
            self._configure(module)
        model.register_forward_hook(_reshard)
        return model

    def _low_precision(self, *, output: torch.dtype | None = None) -> MixedPrecisionPolicy:
        """Return the policy of 16-bit communication and computation, with gradients reduced in 32 bits."""
        if self.compute_dtype is None:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(param_dtype=self.compute_dtype, reduce_dtype=torch.float32, output_dtype=output)

    def _configure(self, module: FSDPModule) -> None:
        # Losses are weighted by their share of the global batch, so gradients are summed, not averaged.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(enable=True)
        module.set_custom_all_gather(cast(Any, self._exchange.gather))
        module.set_custom_reduce_scatter(cast(Any, self._exchange.scatter))
        if cast(Options, self.options).zero_unused_gradients:
            module.set_reduce_scatter_unused_params(True, recurse=False)

    @property
    @override
    def groups(self) -> Sequence[nn.Module]:
        return self._groups

    @override
    def describe(self) -> str:
        return self._description

    @override
    def no_sync(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        if cast(Options, self.options).reduce_each_micro_batch:
            return nullcontext()
        return _without_reduction(cast(FSDPModule, wrapped))

    @contextmanager
    @override
    def no_communication(self, wrapped: nn.Module) -> Iterator[None]:
        with self._exchange.off():
            try:
                yield
            except BaseException:  # such as out of memory: the half-finished pass would make the next one fail
                _reset(cast(FSDPModule, wrapped))
                raise

    @override
    def full_state_dict(self, wrapped: nn.Module) -> Mapping[str, Tensor]:
        # The import takes more than a second, and is needed once, at the end.
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return cast(Mapping[str, Tensor], get_model_state_dict(wrapped, options=options))


def _sharded(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _reset(wrapped: FSDPModule) -> None:
    """Forget a pass that was not finished, its gradients included."""
    if hasattr(wrapped, "reset_iter_state"):
        wrapped.reset_iter_state()
    else:  # what ends each backward pass in these releases
        state = wrapped._get_fsdp_state()
        state._state_ctx.iter_forward_root = None
        state._root_post_backward_final_callback()


@contextmanager
def _without_reduction(wrapped: FSDPModule) -> Iterator[None]:
    wrapped.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        wrapped.set_requires_gradient_sync(True)


def _reshard(model: nn.Module, *_: object) -> None:
    """Reshard after a forward pass without gradients, which no backward pass follows."""
    if not torch.is_grad_enabled():
        for module in _sharded(model):
            module.reshard()


class _Exchange:
    """Switch for communication; while it is off, copies of a rank's own shard stand in for the other ranks' shards.

    Memory and copies stay the same, so a measured difference is communication alone.
    """

    def __init__(self) -> None:
        self.is_on = True
        self.gather = _Gather(self)
        self.scatter = _Scatter(self)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Return a context without communication, in which weights and gradients are meaningless."""
        self.is_on = False
        try:
            yield
        finally:
            self.is_on = True


class _Operation:
    """Interface of torch's AllGather and ReduceScatter."""

    def __init__(self, exchange: _Exchange) -> None:
        self._exchange = exchange

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the memory of an operation."""
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Operation):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if self._exchange.is_on:
            work: dist.Work | None = _gather(output_tensor, input_tensor, group, async_op)
            return work
        for rank, part in enumerate(output_tensor.chunk(group.size())):
            if rank != group.rank():  # this rank's part is the input itself
                part.copy_(input_tensor)
        return None


class _Scatter(_Operation):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        if self._exchange.is_on:
            work: dist.Work | None = _reduce_scatter(output_tensor, input_tensor, op, group, async_op)
            return work
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])
        return None

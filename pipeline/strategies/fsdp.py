"""Fully sharded data parallel (torch's FSDP2): each rank keeps a shard of every parameter, gradient and moment.

The parameters of a group of modules are all-gathered before it computes and resharded afterwards; gradients are
reduce-scattered. Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv
1910.02054; Zhao et al. 2023, "PyTorch FSDP", arXiv 2304.11277.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from pipeline.errors import ExperimentError
from pipeline.experiment.values import Section
from pipeline.strategies import base
from pipeline.strategies._blocks import choose, describe
from pipeline.tasks import Trainee

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


class Strategy(base.Strategy):
    """``fully_shard``, over NCCL on GPUs and gloo on CPU."""

    Options = Options
    processes = "many"
    needs_process_group = True
    is_sharded = True
    casts = True
    _description = ""
    _whole: Sequence[nn.Parameter] = ()
    """Parameters without dimensions, such as a temperature, which can't be sharded: `complete` sums their gradients."""

    @override
    @classmethod
    def refuse(cls, options: Section, *, device: Literal["cpu", "cuda"]) -> str | None:
        fsdp = cast(Options, options)
        if fsdp.cpu_offload and device == "cpu":
            return "cpu_offload needs GPUs, since on the CPU all tensors are in host memory already; remove it"
        if fsdp.zero_unused_gradients and not _SETS_ZEROS:
            return f"zero_unused_gradients needs torch 2.13, but {torch.__version__} is installed; upgrade or remove it"
        if fsdp.zero_unused_gradients and fsdp.groups != "none":
            return (
                "zero_unused_gradients needs groups: none, since a group that the forward pass of one rank skips lets "
                "the other ranks wait until parallel.timeout_s; set groups: none"
            )
        return None

    @override
    def wrap(self, trainee: Trainee) -> nn.Module:
        options, model = cast(Options, self.options), trainee.model
        for name, one in trainee.named_modules():
            if isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.sparse and one.weight.requires_grad:
                message = "has sparse gradients, which fsdp does not support; set sparse: false, or use ddp"
                raise ExperimentError.of("model", f"{name.removeprefix('model.')} {message}")
        if names := [name for name, one in trainee.named_parameters() if one.is_complex()]:
            # fully_shard's gradients of them are wrong: losses differ from those of ddp from the second step on
            message = f"fsdp does not support complex weights such as {names[0].removeprefix('model.')}; use ddp"
            raise ExperimentError.of("parallel.strategy", message)
        groups = choose(model, options.groups)
        self.groups = tuple(groups.values())
        self._description = describe(groups) if self.world_size > 1 else ""
        self._whole = [one for one in trainee.parameters() if not one.ndim]
        for one in self._whole:
            one.data = one.data.to(self.device)
        reshards = None if options.reshard_after_forward == "auto" else options.reshard_after_forward
        shard = partial(
            fully_shard,
            mesh=DeviceMesh.from_group(dist.group.WORLD, self.device.type),  # type: ignore[arg-type]
            reshard_after_forward=reshards,
            offload_policy=CPUOffloadPolicy() if options.cpu_offload else OffloadPolicy(),
            ignored_params=set(self._whole),
        )
        full = low = MixedPrecisionPolicy()
        if self.compute_dtype is not None:  # gradients are reduced in 32 bits
            low = MixedPrecisionPolicy(param_dtype=self.compute_dtype, reduce_dtype=torch.float32)
        for name, module in reversed(list(model.named_modules())):  # inner ones first
            if self.compute_dtype is not None and isinstance(module, _BatchNorm):
                shard(module, mp_policy=full)  # whose running statistics are in full precision
            elif name in groups:
                shard(module, mp_policy=low)
        if self.compute_dtype is not None:
            # The task computes in full precision, with targets that are not rounded. Else model and task are one group,
            # so that a task may use any part of the model.
            shard(model, mp_policy=replace(low, output_dtype=torch.float32), reshard_after_forward=bool(reshards))
        shard(trainee, mp_policy=full)
        self._exchange = _Exchange()
        for sharded in _iter_sharded(trainee):
            # Sums of losses are divided by the size of the global batch, so gradients are summed, not averaged.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(enable=True)
            sharded.set_custom_all_gather(cast(Any, self._exchange))
            sharded.set_custom_reduce_scatter(cast(Any, self._exchange))
            if options.zero_unused_gradients:
                sharded.set_reduce_scatter_unused_params(True, recurse=False)
        trainee.register_forward_hook(_reshard)
        return trainee

    @override
    def describe(self) -> str:
        return self._description

    @contextmanager
    @override
    def no_sync(self, wrapped: nn.Module) -> Iterator[None]:
        sharded = cast(FSDPModule, wrapped)
        sharded.set_requires_gradient_sync(cast(Options, self.options).reduce_each_micro_batch)
        try:
            yield
        finally:
            sharded.set_requires_gradient_sync(True)

    @torch.no_grad()
    @override
    def complete(self, parameters: Iterable[nn.Parameter]) -> None:
        whole = [one for one in self._whole if one.requires_grad]
        if not whole or self.world_size == 1:
            return
        own = [one.new_zeros(()) if one.grad is None else one.grad for one in whole]
        has = [float(one.grad is not None) for one in whole]
        sums = torch.stack([*(one.double() for one in own), *torch.tensor(has, dtype=torch.double, device=self.device)])
        dist.all_reduce(sums)
        for place, one in enumerate(whole):
            if one.grad is not None:
                one.grad.copy_(sums[place])
            elif sums[len(whole) + place]:  # without one on any rank it stays without: the optimizer would let it decay
                one.grad = sums[place].to(one.dtype)

    @contextmanager
    @override
    def no_communication(self, wrapped: nn.Module) -> Iterator[None]:
        self._exchange.is_on = False
        try:
            yield
        except BaseException:  # such as out of memory: forget the half-finished pass, or the next one would fail
            sharded = cast(FSDPModule, wrapped)
            if hasattr(sharded, "reset_iter_state"):
                sharded.reset_iter_state()
            else:  # what ends each backward pass in these releases
                state = sharded._get_fsdp_state()
                state._state_ctx.iter_forward_root = None
                state._root_post_backward_final_callback()
            raise
        finally:
            self._exchange.is_on = True

    @override
    def full_state_dict(self, trainee: nn.Module) -> Mapping[str, Tensor]:
        # The import takes more than a second, and is needed once, at the end.
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return cast(Mapping[str, Tensor], get_model_state_dict(trainee, options=options))


def _iter_sharded(module: nn.Module) -> Iterator[FSDPModule]:
    return (one for one in module.modules() if isinstance(one, FSDPModule))


def _reshard(trainee: nn.Module, *_: object) -> None:
    """Reshard after a pass without gradients: torch keeps the root whole for a backward pass that doesn't come.

    The next step would compute with these weights, even if an average or a checkpoint has been swapped in since.
    """
    if not torch.is_grad_enabled():
        for one in _iter_sharded(trainee):
            one.reshard()


class _Exchange:
    """torch's AllGather and ReduceScatter, which are called with keywords, with a switch for both.

    While it is off, copies of a rank's own shard stand in for the other ranks' shards. Memory and copies stay the same,
    so a measured difference is communication alone. Weights and gradients are meaningless then.
    """

    is_on = True

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any = None,
        async_op: bool = False,
    ) -> dist.Work | None:
        if self.is_on:
            work: dist.Work | None = (
                _gather(output_tensor, input_tensor, group, async_op)
                if op is None
                else _reduce_scatter(output_tensor, input_tensor, op, group, async_op)
            )
            return work
        if op is not None:
            output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])
            return None
        for rank, part in enumerate(output_tensor.chunk(group.size())):
            if rank != group.rank():  # this rank's part is the input itself
                part.copy_(input_tensor)
        return None

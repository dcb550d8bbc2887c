"""DistributedDataParallel: one process for each device, gradients averaged by all-reduce while backward computes.

Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", arXiv 2006.15704.
"""

from contextlib import AbstractContextManager
from typing import Annotated, Literal, cast

import torch.distributed as dist
from pydantic import Field
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from pipeline.config.schema import Frozen
from pipeline.strategies import base


class Options(Frozen):
    """``parallel.options`` of ddp; names and defaults as in torch, except gradient_as_bucket_view (saves a copy)."""

    sync_batch_norm: bool = False
    """Batch statistics over all workers instead of each worker's share (GPUs only)."""
    bucket_cap_mb: Annotated[int, Field(gt=0)] = 25
    """Gradients are all-reduced in buckets of this size."""
    gradient_as_bucket_view: bool = True
    """Gradients live in the buckets, which saves memory and a copy."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same order."""
    find_unused_parameters: bool = False
    """Search for parameters without a gradient in each step; costs time, needed when some are skipped."""


class Strategy(base.Strategy):
    """``DistributedDataParallel``, over NCCL on GPUs and gloo on CPU."""

    Options = Options
    processes = "many"
    needs_process_group = True

    @override
    @classmethod
    def refuse(cls, options: Frozen, *, device: Literal["cpu", "cuda"]) -> str | None:
        if cast(Options, options).sync_batch_norm and device == "cpu":
            return "sync_batch_norm needs GPUs: torch's SyncBatchNorm refuses CPU; remove it"
        return None

    @override
    def wrap(self, model: nn.Module) -> nn.Module:
        options = cast(Options, self.options)
        if options.sync_batch_norm:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        return DistributedDataParallel(
            model,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            bucket_cap_mb=options.bucket_cap_mb,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            static_graph=options.static_graph,
            find_unused_parameters=options.find_unused_parameters,
        )

    @property
    @override
    def gradient_scale(self) -> float:
        return float(self.world_size)

    @override
    def accumulate(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        return cast(AbstractContextManager[None], cast(DistributedDataParallel, wrapped).no_sync())

    @override
    def evaluation_module(self, wrapped: nn.Module, model: nn.Module) -> nn.Module:
        # Buffers such as BatchNorm's running statistics are rank 0's in DDP, but each rank has its own until the next
        # training step. The wrapper itself must not be called here: it would wait for ranks that have no batch left.
        module = cast(nn.Module, cast(DistributedDataParallel, wrapped).module)
        for buffer in module.buffers():
            dist.broadcast(buffer, src=0)
        return module

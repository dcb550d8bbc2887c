"""DistributedDataParallel: one process per device, gradients averaged by all-reduce during backward.

Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", arXiv 2006.15704.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any, Literal, cast

from pydantic import Field
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from pipeline.experiment.values import Section
from pipeline.strategies import base
from pipeline.tasks import Trainee


class Options(Section):
    """``parallel.options`` of ddp. Names and defaults follow torch, with one exception.

    ``gradient_as_bucket_view`` is true by default, which saves a copy.
    """

    sync_batch_norm: bool = False
    """Compute batch statistics over all workers instead of per worker (GPUs only)."""
    bucket_cap_mb: Annotated[int, Field(gt=0)] = 25
    """Size of the buckets in which gradients are all-reduced, in MiB."""
    gradient_as_bucket_view: bool = True
    """Store gradients in the buckets, which saves memory and a copy."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same order."""
    find_unused_parameters: bool = False
    """Find parameters without a gradient in each step. Needed if the model skips some parameters; takes time."""
    communication_hook: Literal["none", "fp16", "bf16"] = "none"
    """Compression of gradients for all-reduce: none, or 16-bit types (bf16: GPUs only)."""


_TIMED_EVERY = {"cpu": 10, "cuda": 100}
"""Steps of which torch times one. On a GPU, where it waits for the step before, that is torch's default."""
_TIMED_AT_FIRST = 10
"""First steps, which torch times all."""
_IGNORED = "_ddp_params_and_buffers_to_ignore"
"""Attribute of a module with the names of what DDP neither broadcasts nor synchronizes."""
_HOOKS = {"fp16": fp16_compress_hook, "bf16": bf16_compress_hook}


class Strategy(base.Strategy):
    """``DistributedDataParallel``, over NCCL on GPUs and gloo on CPU."""

    Options = Options
    processes = "many"
    needs_process_group = True
    _knows_graph = False
    _exchanged = (0, 0.0)
    """Steps that torch had timed at the last call of `exchange_ms`, and nanoseconds of their mean exchange."""

    @override
    @classmethod
    def refuse(cls, options: Section, *, device: Literal["cpu", "cuda"]) -> str | None:
        ddp = cast(Options, options)
        if ddp.sync_batch_norm and device == "cpu":
            return "sync_batch_norm needs GPUs, since torch's SyncBatchNorm does not support the CPU; remove it"
        if ddp.communication_hook == "bf16" and device == "cpu":
            return "communication_hook: bf16 needs GPUs, since torch sends bf16 over NCCL only; use fp16"
        return None

    @override
    @classmethod
    def refuse_several(cls, options: Section) -> str | None:
        changed = options.model_dump(exclude={"sync_batch_norm"}, exclude_defaults=True)
        message = "is an option of torch's DDP, which is not used with several optimizers; remove it"
        return f"{min(changed)} {message}" if changed else None

    @override
    def prepare(self, trainee: Trainee) -> nn.Module:
        if cast(Options, self.options).sync_batch_norm:
            return cast(nn.Module, nn.SyncBatchNorm.convert_sync_batchnorm(trainee))  # type: ignore[no-untyped-call]
        return trainee

    @override
    def wrap(self, trainee: Trainee) -> nn.Module:
        options = cast(Options, self.options)
        ignored = [f"model.{name}" for name in getattr(trainee.model, _IGNORED, ())]
        for name, module in trainee.task.named_modules(prefix="task"):
            if type(module).__module__ == "torch.nn.modules.loss":  # weights of classes, which no step changes
                ignored += [f"{name}.{own}" for own, _ in module.named_buffers(recurse=False)]
        setattr(trainee, _IGNORED, ignored)
        # Without device_ids torch doesn't search each batch for tensors to move: they are on the device.
        wrapped = DistributedDataParallel(
            self.prepare(trainee),
            bucket_cap_mb=options.bucket_cap_mb,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            static_graph=options.static_graph,
            find_unused_parameters=options.find_unused_parameters,
        )
        wrapped._set_ddp_runtime_logging_sample_rate(_TIMED_EVERY[self.device.type])  # type: ignore[no-untyped-call]
        if options.communication_hook != "none":
            wrapped.register_comm_hook(None, _HOOKS[options.communication_hook])
        return wrapped

    @property
    @override
    def needs_equal_passes(self) -> bool:
        # The first step of a static graph exchanges twice, see `no_sync`; a rank with one micro-batch would do so once.
        return cast(Options, self.options).static_graph

    @property
    @override
    def gradient_scale(self) -> float:
        return float(self.world_size)

    @override
    def no_sync(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        # torch records a static graph in the first backward pass and fails if that pass isn't synchronized. One more
        # exchange changes no result: the average of equal averages is the same.
        if cast(Options, self.options).static_graph and not self._knows_graph:
            self._knows_graph = True
            return nullcontext()
        return cast(AbstractContextManager[None], cast(DistributedDataParallel, wrapped).no_sync())

    @override
    def exchange_ms(self, wrapped: nn.Module) -> float | None:
        if self.world_size == 1 or not isinstance(wrapped, DistributedDataParallel):
            return None
        logged: Mapping[str, Any] = wrapped._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        steps, mean_ns = int(logged.get("iteration", 0)), float(logged.get("avg_backward_comm_time", 0))
        timed = timed_of(steps, every=_TIMED_EVERY[self.device.type])
        (timed_before, mean_before), self._exchanged = self._exchanged, (timed, mean_ns)
        if timed == timed_before:
            return None
        return (timed * mean_ns - timed_before * mean_before) / (timed - timed_before) / 1e6


def timed_of(steps: int, *, every: int) -> int:
    """Return how many of the first steps torch has timed."""
    return steps if steps <= _TIMED_AT_FIRST else _TIMED_AT_FIRST + steps // every - _TIMED_AT_FIRST // every

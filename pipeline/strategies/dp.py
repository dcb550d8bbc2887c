"""DataParallel: one process drives several GPUs of its machine. For prototypes; `ddp` is faster almost everywhere.

Each step copies model and task to every GPU, splits the batch, and adds up the losses on GPU 0. GPU 0 therefore uses
more memory than the other GPUs, as the measured peak memory shows.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel.scatter_gather import gather
from typing_extensions import override

from pipeline.strategies import base
from pipeline.tasks import Loss, Trainee, count_samples, gathering


class Strategy(base.Strategy):
    """``nn.DataParallel`` over the GPUs of the process; with less than two, the model itself."""

    devices = "all"

    @override
    def wrap(self, trainee: Trainee) -> nn.Module:
        return _SummingDataParallel(trainee, device_ids=self.gpus) if len(self.gpus) > 1 else trainee


class _OfReplica(NamedTuple):
    loss: Loss
    samples: int


class _SummingDataParallel(nn.DataParallel[nn.Module]):
    """``nn.DataParallel`` whose replicas return sums, so that it is exact for any task.

    They compute in the autocast type of the calling thread: torch runs each in a thread, where it enables autocast with
    the default type, fp16.
    """

    @override
    def forward(self, *inputs: Any, **named: Any) -> Any:
        gathering.current.samples = None  # replicas count those of their parts
        return super().forward(*inputs, **named)

    @override
    def parallel_apply(self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        dtype = torch.get_autocast_dtype("cuda")
        calls: list[Any] = [partial(_compute, dtype, replica) for replica in replicas]
        return super().parallel_apply(calls, inputs, kwargs)

    @override
    def gather(self, outputs: Sequence[_OfReplica], output_device: Any) -> Loss:
        losses = [one.loss for one in outputs]
        sums, counts = (_stack([getattr(one, name) for one in losses], output_device) for name in ("sum", "count"))
        assert sums is not None
        weights = sums.new_tensor([one.samples for one in outputs]) if counts is None else counts.to(sums.dtype)
        logs = {}
        for name in losses[0].logs:
            values = _stack([one.logs[name] for one in losses], output_device)
            assert values is not None
            logs[name] = (values * weights).sum() / weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)
        results, targets = (
            None if losses[0][place] is None else gather([one[place] for one in losses], output_device)
            for place in (2, 3)
        )
        return Loss(sums.sum(), None if counts is None else counts.sum(), results, targets, logs)


def _compute(dtype: torch.dtype, replica: nn.Module, /, *inputs: Any, **named: Any) -> _OfReplica:
    """Call a replica with autocast in ``dtype``, if it is enabled."""
    with torch.autocast("cuda", dtype=dtype, enabled=torch.is_autocast_enabled("cuda")):
        loss: Loss = replica(*inputs, **named)
    return _OfReplica(loss, count_samples(inputs[0]) if loss.logs and loss.count is None else 0)


def _stack(parts: Sequence[Tensor | None], device: Any) -> Tensor | None:
    found = [one.to(device) for one in parts if one is not None]
    return torch.stack(found) if found else None

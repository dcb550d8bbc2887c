"""DataParallel: one process drives several GPUs of its machine. For prototypes; `ddp` is faster almost everywhere.

Each step copies the model to every GPU, splits the batch, and gathers the outputs on GPU 0, which also computes the
loss. GPU 0 therefore computes more and uses more memory than the other GPUs, as the measured peak memory shows.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from pipeline.strategies import base


class Strategy(base.Strategy):
    """``nn.DataParallel`` over the GPUs of the process; with less than two, the model itself."""

    devices = "all"

    @override
    def wrap(self, model: nn.Module) -> nn.Module:
        return _DataParallel(model, device_ids=self.gpus) if len(self.gpus) > 1 else model


class _DataParallel(nn.DataParallel[nn.Module]):
    """``nn.DataParallel`` whose replicas compute in the autocast type of the calling thread.

    torch runs each replica in a thread, where it enables autocast with the default type, fp16.
    """

    @override
    def parallel_apply(self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        dtype = torch.get_autocast_dtype("cuda")
        calls: list[Any] = [partial(_compute, dtype, replica) for replica in replicas]
        return super().parallel_apply(calls, inputs, kwargs)


def _compute(dtype: torch.dtype, replica: nn.Module, /, *inputs: Any, **named: Any) -> Any:
    """Call a replica with autocast in ``dtype``, if it is enabled."""
    with torch.autocast("cuda", dtype=dtype, enabled=torch.is_autocast_enabled("cuda")):
        return replica(*inputs, **named)

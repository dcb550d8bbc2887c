"""DataParallel: one process drives all GPUs of its machine. For prototypes; `ddp` is faster almost everywhere.

Each step copies the model to every GPU, splits the batch, and gathers the outputs on GPU 0, which also computes the
loss: GPU 0 is busier and its memory fuller than that of the other GPUs, as the measured peak memory shows.
"""

import torch
from torch import nn
from typing_extensions import override

from pipeline.strategies import base


class Strategy(base.Strategy):
    """``nn.DataParallel`` over all visible GPUs; with fewer than two the model itself, one replica."""

    devices = "all"

    @override
    def wrap(self, model: nn.Module) -> nn.Module:
        if self.device.type == "cuda" and torch.cuda.device_count() > 1:
            return nn.DataParallel(model)
        return model

"""SyncBatchNorm layers of a model, which send statistics to the other ranks in each forward and backward pass."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from pipeline.errors import ExperimentError


def check_device(model: nn.Module, device: torch.device) -> None:
    """Check that SyncBatchNorm layers have a GPU, where several workers train.

    Raises:
        ExperimentError: a layer is on the CPU.
    """
    if device.type != "cpu" or not dist.is_initialized():
        return
    layers = [name for name, layer in model.named_modules() if type(layer) is nn.SyncBatchNorm]
    if layers:
        what = f"the layer {layers[0]}" if layers[0] else "the model"
        raise ExperimentError.of(
            "model",
            f"{what} is a SyncBatchNorm, which works on GPUs only. Use torch.nn.BatchNorm1d, 2d or 3d. "
            "On GPUs, parallel.options.sync_batch_norm: true then computes statistics over all workers.",
        )


class SyncedNorms:
    """The SyncBatchNorm layers of a module, if it has any."""

    def __init__(self, module: nn.Module) -> None:
        """Find the layers. Collective if there are any."""
        self._layers = [layer for layer in module.modules() if isinstance(layer, nn.SyncBatchNorm)]
        self._alone = _group_of_one() if self._layers else None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let the layers use the statistics of this rank's batch inside the block, without communication."""
        groups = [layer.process_group for layer in self._layers]
        for layer in self._layers:
            layer.process_group = self._alone
        try:
            yield
        finally:
            for layer, group in zip(self._layers, groups, strict=True):
                layer.process_group = group


def _group_of_one() -> dist.ProcessGroup | None:
    """Create a process group of this rank alone; None without torch.distributed. Collective."""
    if not dist.is_initialized():
        return None
    group: dist.ProcessGroup = dist.new_subgroups(group_size=1)[0]  # type: ignore[no-untyped-call]
    return group

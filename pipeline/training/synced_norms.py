"""SyncBatchNorm layers of a model, which send statistics to the other ranks in each forward and backward pass."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn


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

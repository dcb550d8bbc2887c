"""Buffers of a module, such as BatchNorm's statistics, which a forward pass changes."""

from torch import nn


class Buffers:
    """Copy of a module's buffers."""

    def __init__(self, module: nn.Module) -> None:
        self._buffers = list(module.buffers())
        self._before = [buffer.clone() for buffer in self._buffers]

    def restore(self) -> None:
        """Restore the values of the buffers."""
        for buffer, before in zip(self._buffers, self._before, strict=True):
            buffer.copy_(before)

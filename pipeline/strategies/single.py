"""One process, one device: what speedups are relative to."""

from torch import nn
from typing_extensions import override

from pipeline.strategies import base


class Strategy(base.Strategy):
    """The model as it is."""

    @override
    def wrap(self, model: nn.Module) -> nn.Module:
        return model

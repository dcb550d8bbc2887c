"""One process on one device, without a wrapper around the model."""

from torch import nn
from typing_extensions import override

from pipeline.config.values import Section
from pipeline.strategies import base


class Strategy(base.Strategy):
    """The unwrapped model."""

    @override
    @classmethod
    def refuse_several(cls, options: Section) -> str | None:
        return None

    @override
    def wrap(self, model: nn.Module) -> nn.Module:
        return model

"""One process on one device, without a wrapper around the model."""

from torch import nn
from typing_extensions import override

from pipeline.experiment.values import Section
from pipeline.strategies import base
from pipeline.tasks import Trainee


class Strategy(base.Strategy):
    """The unwrapped model."""

    @override
    @classmethod
    def refuse_several(cls, options: Section) -> str | None:
        return None

    @override
    def wrap(self, trainee: Trainee) -> nn.Module:
        return trainee

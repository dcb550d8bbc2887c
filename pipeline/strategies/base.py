"""What a strategy is: where a trial's processes and devices are, and how gradients are brought together."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, Literal

import torch
from torch import nn

from pipeline.config.schema import Frozen


class NoOptions(Frozen):
    """A strategy without options of its own."""


class Strategy(ABC):
    """Wraps a model for data-parallel training.

    The contract, held by tests/contract/test_strategies.py for every file in this folder: training on the same
    global batches reaches the same weights as ``single``. The loop hands each process its share of a global batch
    and scales each loss by `gradient_scale` times the share's part of the batch, so that what reaches the optimizer
    is the gradient of the mean over the global batch, uneven shares included.
    """

    Options: ClassVar[type[Frozen]] = NoOptions
    """The model of ``parallel.options``."""
    processes: ClassVar[Literal["one", "many"]] = "one"
    """Whether ``workers`` processes run, or always one."""
    devices: ClassVar[Literal["one", "all"]] = "one"
    """GPUs of each process: one, or all that its machine has."""
    needs_process_group: ClassVar[bool] = False
    """Whether torch.distributed must be initialized, even for a single process."""

    def __init__(self, options: Frozen, *, device: torch.device, world_size: int) -> None:
        self.options = options
        self.device = device
        self.world_size = world_size

    @classmethod
    def refuse(cls, options: Frozen, *, device: Literal["cpu", "cuda"]) -> str | None:
        """Why these options can't run on this kind of device, and what to write instead; None if they can."""
        return None

    @abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """The module that training calls; ``model`` is already on the device, in its precision."""

    @property
    def gradient_scale(self) -> float:
        """Undoes the averaging over processes, if the strategy averages gradients; 1 if it doesn't."""
        return 1.0

    def accumulate(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        """A context in which backward keeps gradients to itself, for all micro-batches but the last."""
        return nullcontext()

    def evaluation_module(self, wrapped: nn.Module, model: nn.Module) -> nn.Module:
        """The module that evaluation calls; ranks may call it a different number of times.

        Collective: every rank calls this method.
        """
        return model

"""What a strategy is: where a trial's processes and devices are, and how gradients are brought together."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from pipeline.config.values import Section


def sparse_modules(model: nn.Module) -> list[str]:
    """Names of the trainable embeddings whose gradients are sparse (``sparse=True``)."""
    found = ((name, one) for name, one in model.named_modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag))
    return [name for name, module in found if module.sparse and module.weight.requires_grad]


class NoOptions(Section):
    """A strategy without options of its own."""


class Strategy(ABC):
    """Wraps a model for data-parallel training.

    The contract, held by tests/contract/test_strategies.py for every file in this folder: training on the same
    global batches reaches the same weights as ``single``. The loop hands each process its share of a global batch
    and scales each loss by `gradient_scale` times the share's part of the batch, so that what reaches the optimizer
    is the gradient of the mean over the global batch, uneven shares included.
    """

    Options: ClassVar[type[Section]] = NoOptions
    """The model of ``parallel.options``."""
    processes: ClassVar[Literal["one", "many"]] = "one"
    """Whether ``workers`` processes run, or always one."""
    devices: ClassVar[Literal["one", "all"]] = "one"
    """GPUs of each process: one, or all that its machine has."""
    needs_process_group: ClassVar[bool] = False
    """Whether torch.distributed must be initialized, even for a single process."""
    shards: ClassVar[bool] = False
    """Whether each rank holds a part of the weights: `wrap` gets the model on the CPU, and each pass is an exchange,
    so all ranks make as many of them."""
    casts: ClassVar[bool] = False
    """Whether the module computes in ``compute_dtype`` by itself, without autocast."""

    def __init__(
        self, options: Section, *, device: torch.device, world_size: int, compute_dtype: torch.dtype | None = None
    ) -> None:
        """``compute_dtype`` is the 16-bit type of ``train.precision``, if it is one."""
        self.options = options
        self.device = device
        self.world_size = world_size
        self.compute_dtype = compute_dtype

    @classmethod
    def refuse(cls, options: Section, *, device: Literal["cpu", "cuda"]) -> str | None:
        """Why these options can't run on this kind of device, and what to write instead; None if they can."""
        return None

    @abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """The module that training calls; ``model`` is in its precision, and on the device unless it is to be sharded.

        Raises:
            ExperimentError: the model can't be spread in this way.
        """

    def compiled(self, wrapped: nn.Module, model: nn.Module) -> Sequence[nn.Module]:
        """The modules of a wrapped model whose forward passes can be compiled, each as a whole."""
        return [model]

    def describe(self) -> str:
        """How the model was cut, in words; empty if every process has all of it."""
        return ""

    @property
    def needs_equal_passes(self) -> bool:
        """Whether all ranks must make as many forward and backward passes in a step."""
        return self.shards

    @property
    def gradient_scale(self) -> float:
        """Undoes the averaging over processes, if the strategy averages gradients; 1 if it doesn't."""
        return 1.0

    def no_sync(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        """A context in which backward keeps gradients to itself, for all micro-batches but the last."""
        return nullcontext()

    def no_communication(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        """A context in which forward and backward send nothing to other ranks, for measuring what that costs.

        What they compute may be meaningless. A rank may fail in it, as far as memory goes, without the others waiting.
        """
        return self.no_sync(wrapped)

    def after_step(self, model: nn.Module) -> None:  # noqa: B027 (most have nothing to do then)
        """The optimizer has taken a step, or left one out. Collective."""

    def set_step(self, *, steps: int) -> None:  # noqa: B027 (most don't count)
        """So many steps have been taken, in this process or before."""

    @property
    def steps_alone(self) -> bool:
        """Whether the gradients of the next step stay with their ranks."""
        return False

    @property
    def diverges(self) -> bool:
        """Whether each rank has weights, and a state of the optimizer, of its own at the moment."""
        return False

    def averaged_weights(self, model: nn.Module) -> AbstractContextManager[None]:
        """A context in which all ranks have the same weights, if they differ.

        Afterwards each has its own again. Collective.
        """
        return nullcontext()

    def state_dict(self) -> Mapping[str, Any] | None:
        """What this rank's strategy itself carries from step to step: numbers, texts, tensors; None: nothing.

        On all ranks or on none, with tensors of the same names and shapes.
        """
        return None

    def load_state_dict(self, memory: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` was, after a backward pass of the same model."""
        raise NotImplementedError(f"{type(self).__qualname__} has a memory; it needs remember(), too, to be resumed")

    def evaluation_module(self, wrapped: nn.Module, model: nn.Module) -> nn.Module:
        """The module that evaluation calls; ranks may call it a different number of times, unless it is sharded.

        Collective: every rank calls this method.
        """
        return model

    def weights(self, wrapped: nn.Module, model: nn.Module) -> Mapping[str, torch.Tensor]:
        """All weights and buffers by their names in ``model``, on rank 0; what other ranks return doesn't matter.

        Collective.
        """
        return self.evaluation_module(wrapped, model).state_dict()

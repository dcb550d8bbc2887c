"""Interface of a strategy: its processes and devices, and how it synchronizes gradients."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from pipeline.config.values import Section


class NoOptions(Section):
    """Options of a strategy that has none."""


class Strategy(ABC):
    """Wraps a model for data-parallel training.

    The contract, held by tests/contract/test_strategies.py for every file in this folder: training on the same
    global batches reaches the same weights as ``single``. The loop hands each process its share of a global batch
    and scales each loss by `gradient_scale` times the share's part of the batch, so that what reaches the optimizer
    is the gradient of the mean over the global batch, uneven shares included.

    Only `wrap` must be written. A strategy whose ranks hold parts of the weights is a `Sharded` one.
    """

    Options: ClassVar[type[Section]] = NoOptions
    """The model of ``parallel.options``."""
    processes: ClassVar[Literal["one", "many"]] = "one"
    """Processes that run: always one, or as many as ``workers``."""
    devices: ClassVar[Literal["one", "all"]] = "one"
    """GPUs of each process: one, or ``parallel.gpus_per_worker``, by default all that its machine has."""
    gpus: Sequence[int] = ()
    """CUDA indices of this process's GPUs, the one of `device` first; empty on CPU. Set before `wrap` is called."""
    needs_process_group: ClassVar[bool] = False
    """True if torch.distributed must be initialized even for a single process."""

    def __init__(
        self, options: Section, *, device: torch.device, world_size: int, compute_dtype: torch.dtype | None = None
    ) -> None:
        """Keep the arguments; `wrap` does the work.

        Args:
            options: ``parallel.options``, validated by `Options`.
            device: the device of this rank.
            world_size: number of processes.
            compute_dtype: the 16-bit type of ``train.precision``, or None.
        """
        self.options = options
        self.device = device
        self.world_size = world_size
        self.compute_dtype = compute_dtype

    @classmethod
    def refuse(cls, options: Section, *, device: Literal["cpu", "cuda"]) -> str | None:
        """Return why these options can't run on this type of device; None if they can.

        The text includes what to set instead.
        """
        return None

    @abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module that training calls; ``model`` is on the device and in its precision.

        Raises:
            ExperimentError: this model can't be trained with this strategy.
        """

    @classmethod
    def refuse_several(cls, options: Section) -> str | None:
        """Return why these options can't train with several optimizers; None if they can.

        The text includes what to set instead.
        """
        return "wraps the whole model, but a task with several optimizers calls parts of the model; use ddp"

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return the module that a task with several optimizers calls, instead of `wrap`.

        The loop itself sums the gradients of each optimizer over the processes.
        """
        return model

    @property
    def gradient_scale(self) -> float:
        """Factor on each loss: the world size if gradients are averaged, 1 if they are summed."""
        return 1.0

    @property
    def needs_equal_passes(self) -> bool:
        """True if all ranks must run the same number of forward and backward passes in a step."""
        return False

    def no_sync(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        """Return a context without gradient synchronization, for all but the last micro-batch."""
        return nullcontext()

    def exchange_ms(self, wrapped: nn.Module) -> float | None:
        """Return this rank's mean gradient synchronization time per step, in milliseconds.

        The mean is over the steps since the last call. None if the strategy doesn't time it, or no step was timed.
        Doesn't wait for the device.
        """
        return None


class Sharded(Strategy):
    """Strategy that shards the weights and communicates in each forward and backward pass.

    `wrap` gets the model on the CPU, and returns a module that computes in ``compute_dtype`` without autocast.
    """

    @property
    def needs_equal_passes(self) -> bool:
        """True: a rank with fewer passes would leave the others waiting."""
        return True

    @property
    @abstractmethod
    def groups(self) -> Sequence[nn.Module]:
        """Modules that are gathered and compiled as a unit; empty for the whole model."""

    @abstractmethod
    def describe(self) -> str:
        """Return how the model is sharded, for the report; empty if it is not sharded."""

    @abstractmethod
    def no_communication(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        """Return a context without communication, to measure what communication costs.

        Their results may be meaningless. A rank may run out of memory inside without another rank waiting for it.
        """

    @abstractmethod
    def full_state_dict(self, wrapped: nn.Module) -> Mapping[str, Tensor]:
        """Return all weights and buffers by name, on the CPU of rank 0. Collective."""


def sparse_modules(model: nn.Module) -> list[str]:
    """Return the names of the trainable embeddings whose gradients are sparse (``sparse=True``)."""
    found = ((name, one) for name, one in model.named_modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag))
    return [name for name, module in found if module.sparse and module.weight.requires_grad]

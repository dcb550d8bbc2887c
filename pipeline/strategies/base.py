"""Interface of a strategy: its processes and devices, and how it synchronizes gradients."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from pipeline.experiment.values import Section
from pipeline.tasks import Trainee


class NoOptions(Section):
    """Options of a strategy that has none."""


class Strategy(ABC):
    """Wraps model and task, one module, for data-parallel training.

    The contract, held by tests/system/contract/test_strategies.py for every file in this folder: training on the same
    global batches reaches the same weights as ``single``. The step hands each process its share of a global batch and
    runs backward from the sum of the share's losses, times `gradient_scale` and divided by the global batch's samples.
    So what reaches the optimizer is the gradient of the mean over the global batch, uneven shares included.

    Only `wrap` must be written.
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
    is_sharded: ClassVar[bool] = False
    """True if each rank holds shards of the weights, and communicates in each pass; `wrap` gets a module on the CPU."""
    casts: ClassVar[bool] = False
    """True if the strategy computes in ``compute_dtype`` itself, without autocast."""
    groups: Sequence[nn.Module] = ()
    """Modules that are gathered and compiled as a unit; empty for the whole model."""

    def __init__(
        self, options: Section, *, device: torch.device, world_size: int, compute_dtype: torch.dtype | None = None
    ) -> None:
        """Keep the validated options, this rank's device, and the 16-bit type of ``train.precision``, or None."""
        self.options, self.device, self.world_size, self.compute_dtype = options, device, world_size, compute_dtype

    @classmethod
    def refuse(cls, options: Section, *, device: Literal["cpu", "cuda"]) -> str | None:
        """Return why these options can't run on this type of device, and what to set instead; None if they can."""
        return None

    @classmethod
    def refuse_several(cls, options: Section) -> str | None:
        """Return why these options can't train several optimizers, and what to set instead; None if they can."""
        return "wraps the whole model, but a task with several optimizers calls parts of the model; use ddp"

    @abstractmethod
    def wrap(self, trainee: Trainee) -> nn.Module:
        """Return the module that a step calls with a batch; the trainee is on the device and in its precision.

        Raises:
            ExperimentError: this model can't be trained with this strategy.
        """

    def prepare(self, trainee: Trainee) -> nn.Module:
        """Return what trains with several optimizers, instead of `wrap`: the step sums the gradients of each."""
        return trainee

    @property
    def gradient_scale(self) -> float:
        """Factor on each loss: the world size if gradients are averaged, 1 if they are summed."""
        return 1.0

    @property
    def needs_equal_passes(self) -> bool:
        """True if all ranks must run the same number of forward and backward passes in a step."""
        return self.is_sharded

    def no_sync(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        """Return a context of both passes of all micro-batches but the last, without gradient synchronization."""
        return nullcontext()

    def complete(self, parameters: Iterable[nn.Parameter]) -> None:  # noqa: B027
        """Sum gradients that a step's last backward pass hasn't synchronized over the ranks. Collective."""

    def no_communication(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        """Return a context without communication, to measure what communication costs.

        Results may be meaningless. A rank may run out of memory inside without another rank waiting for it.
        """
        return self.no_sync(wrapped)

    def exchange_ms(self, wrapped: nn.Module) -> float | None:
        """Return this rank's mean time of gradient synchronization in the steps since the last call, in milliseconds.

        None if no step was timed. Doesn't wait for the device.
        """
        return None

    def describe(self) -> str:
        """Return how the model is sharded, for the report; empty if it is not sharded."""
        return ""

    def full_state_dict(self, trainee: nn.Module) -> Mapping[str, Tensor]:
        """Return all weights and buffers by name, on rank 0. Collective."""
        state: dict[str, Any] = trainee.state_dict()
        return state

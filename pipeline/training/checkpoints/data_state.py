"""State of the data at a step: the position in an iterable dataset.

Rank 0 saves it for all ranks, so that it is valid at any world size.
"""

from collections.abc import Callable

from torch import Tensor

from pipeline.errors import ExperimentError
from pipeline.training.checkpoints.encoding import join, split
from pipeline.training.checkpoints.state import State
from pipeline.training.context import TrainContext

_POSITION = "position"
"""Key in a checkpoint."""


def copy_position(context: TrainContext, *, step: int) -> State:
    """Copy the position after ``step`` steps, on rank 0, to the CPU; empty on other ranks, or if there is none."""
    position = context.batches.position(step) if context.rank.is_first else None
    if position is None:
        return State({}, {})
    tensors: dict[str, Tensor] = {}
    try:
        values = split(position, name=_POSITION, tensors=tensors)
    except ExperimentError:  # a state that can't be stored without pickle: the samples are read again
        return State({}, {_POSITION: {**position, "state": [None]}})
    return State({name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}, {_POSITION: values})


def restore_position(context: TrainContext, state: State, *, step: int, warn: Callable[[str], None]) -> None:
    """Restore the position after ``step`` steps, at any world size.

    Raises:
        TrainingError: a sample of an iterable dataset can't be read.
    """
    position = state.values.get(_POSITION)
    context.batches.resume(join(position, state.tensors) if position is not None else None, step=step, warn=warn)

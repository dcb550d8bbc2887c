"""State of the data at a step: what its rows carry to the next batch, and the position in an iterable dataset.

Rank 0 saves it for all ranks, so that it is valid at any world size.
"""

from collections.abc import Callable

from torch import Tensor

from pipeline.errors import ExperimentError
from pipeline.training.checkpoints.encoding import join, split
from pipeline.training.checkpoints.state import State
from pipeline.training.context import TrainContext

_CARRIED, _POSITION = "carried", "position"
"""Keys in a checkpoint."""


def gather(context: TrainContext, *, step: int) -> State:
    """Gather the state after ``step`` steps on rank 0, on the CPU; empty on other ranks, or if there is none.

    Collective.
    """
    tensors: dict[str, Tensor] = {}
    values = {}
    carried = context.carried.gathered(context.rank) if context.carried is not None else None
    if not context.rank.is_first:
        return State({}, {})
    if carried is not None:
        values[_CARRIED] = split(carried, name=_CARRIED, tensors=tensors)
    if (position := context.batches.position(step)) is not None:
        own: dict[str, Tensor] = {}
        try:
            values[_POSITION] = split(position, name=_POSITION, tensors=own)
        except ExperimentError:  # a state that can't be stored without pickle: the samples are read again
            values[_POSITION] = {**position, "state": [None]}
        else:
            tensors |= {name: tensor.detach().to("cpu", copy=True) for name, tensor in own.items()}
    return State(tensors, values)


def load(context: TrainContext, state: State, *, step: int, warn: Callable[[str], None]) -> None:
    """Load the state after ``step`` steps, at any world size.

    Raises:
        TrainingError: a sample of an iterable dataset can't be read.
    """
    if context.carried is not None:
        if (carried := state.values.get(_CARRIED)) is not None:
            context.carried.load(join(carried, state.tensors), rank=context.rank, device=context.device)
        else:
            context.carried.reset()
            if step % context.order.steps_per_epoch:
                warn("the checkpoint has no state of the task's rows: they begin without one")
    position = state.values.get(_POSITION)
    context.batches.resume(join(position, state.tensors) if position is not None else None, step=step, warn=warn)

"""Logs of a task: values besides the loss (`StepOutput.logs`), averaged over the global batch as the loss is."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pipeline.config.reported import LEARNING_RATE, OF_GROUP, OF_TRAINING, mlflow_name
from pipeline.errors import ExperimentError
from pipeline.protocol.rank import Rank
from pipeline.tasks import StepOutput
from pipeline.training.ranks.collectives import gather


def names_of(logs: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return the names of a task's logs, sorted: ranks exchange values by position.

    Raises:
        ExperimentError: a name is reported already, or equals another one in MLflow.
    """
    taken = set(OF_TRAINING)
    for name in logs:
        if not isinstance(name, str) or not name:
            raise _refused(f"has the name {name!r}; use a non-empty string")
        if (written := mlflow_name(name)) in taken or written.startswith(f"{LEARNING_RATE}{OF_GROUP}"):
            raise _refused(f"has the name {name}, but train/{written} is already reported; choose another name")
        taken.add(written)
    return tuple(sorted(logs))


def check(logs: Mapping[str, Tensor], *, names: Sequence[str]) -> None:
    """Check the logs of one batch.

    Raises:
        ExperimentError: other names than those of the first batch, or a value that isn't a scalar tensor.
    """
    if len(logs) != len(names) or not all(name in logs for name in names):
        raise _refused(
            f"has {_listed(sorted(map(str, logs)))} in one batch, but {_listed(names)} in the first. Return the same "
            "names for every batch of training, and for every batch of an evaluation."
        )
    for name in names:
        if not isinstance(value := logs[name], Tensor) or value.ndim:
            what = f"tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise _refused(f"has a {what} as {name}; it must be a scalar tensor, the mean over the batch")


def agree(names: tuple[str, ...] | None, *, rank: Rank) -> tuple[str, ...]:
    """Return the names that all ranks have; None stands for a rank without a batch so far. Collective.

    Raises:
        ExperimentError: ranks have different names.
    """
    told = {number: own for number, own in enumerate(gather(names, rank=rank)) if own is not None}
    if len(set(told.values())) > 1:
        each = ", ".join(f"{_listed(own)} on rank {number}" for number, own in told.items())
        raise _refused(f"has {each}; return the same names for every batch")
    return next(iter(told.values()), ())


def with_loss(loss: Tensor, output: StepOutput, *, names: Sequence[str]) -> Tensor:
    """Return the loss followed by the logs, shape (1 + logs,), without graph; logs of weight 0 are 0."""
    if not names:
        return loss.detach()[None]
    logs = torch.stack([output.logs[name].detach().to(loss.device, loss.dtype) for name in names])
    if output.weight is not None:
        logs = torch.where(output.weight != 0, logs, 0.0)  # the mean of an empty set is NaN
    return torch.cat([loss.detach()[None], logs])


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"


def _refused(message: str) -> ExperimentError:
    return ExperimentError.of("task", f"StepOutput.logs {message}")

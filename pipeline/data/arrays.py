"""Dataset of memory-mapped .npy files."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from pipeline.data.splits import Mapped, Splits, Table
from pipeline.errors import ExperimentError

Transform = Callable[[Tensor], Tensor]


def arrays(
    *,
    inputs: str,
    targets: str,
    validation_inputs: str | None = None,
    validation_targets: str | None = None,
    transform: Transform | None = None,
) -> Splits:
    """Return pairs (inputs[i], targets[i]) from memory-mapped .npy files.

    Tensors have the dtypes of the files.

    Args:
        inputs: file with an array of shape (samples, ...).
        targets: file with an array of shape (samples, ...).
        validation_inputs: inputs of the validation set. None trains without validation.
        validation_targets: targets of the validation set.
        transform: function applied to the input of each sample, e.g. to convert bytes to floats. It may be random.

    Raises:
        ExperimentError: a file can't be mapped, or inputs and targets differ in length.
    """
    if (validation_inputs is None) != (validation_targets is None):
        missing = "validation_inputs" if validation_inputs is None else "validation_targets"
        raise ExperimentError.of(f"data.{missing}", "missing; validation needs both inputs and targets")
    train = _pairs(inputs, targets, prefix="data.", transform=transform)
    if validation_inputs is None or validation_targets is None:
        return Splits(train, None)
    return Splits(train, _pairs(validation_inputs, validation_targets, prefix="data.validation_", transform=transform))


def _pairs(inputs: str, targets: str, *, prefix: str, transform: Transform | None) -> Dataset[tuple[Tensor, ...]]:
    columns = (Mapped(Path(inputs), key=f"{prefix}inputs"), Mapped(Path(targets), key=f"{prefix}targets"))
    if len(columns[0]) != len(columns[1]):
        message = (
            f"{targets} has {len(columns[1])} rows, but {inputs} has {len(columns[0])}. Each sample needs one input "
            "and one target."
        )
        raise ExperimentError.of(f"{prefix}targets", message)
    pairs = _Pairs(columns)
    return _Transformed(pairs, transform) if transform else pairs


class _Pairs(Table):
    def __init__(self, columns: tuple[Mapped, ...]) -> None:
        self._columns = columns

    @override
    def __len__(self) -> int:
        return len(self._columns[0])

    @override
    def batch(self, indices: list[int]) -> tuple[Tensor, ...]:
        return tuple(torch.from_numpy(column.values[indices]) for column in self._columns)


class _Transformed(Dataset[tuple[Tensor, ...]]):
    """Dataset that is read sample by sample, since a transform may be random."""

    def __init__(self, pairs: _Pairs, transform: Transform) -> None:
        self._pairs = pairs
        self._transform = transform

    def __len__(self) -> int:
        return len(self._pairs)

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        inputs, targets = self._pairs[index]
        return self._transform(inputs), targets

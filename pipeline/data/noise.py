"""Noise for generative models, drawn with each sample, so that it doesn't depend on the number of workers."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from pipeline.errors import ExperimentError


def with_noise(of: Any, *, size: int) -> tuple[Any, ...]:
    """Return pairs of (noise, input) of the training, validation and test set that another data function returned.

    Noise is standard normal, float32 of shape (size,): in training drawn anew for a sample in each epoch, in evaluation
    always the same. Where samples are tuples, their first field is the input.

    Args:
        of: data function, as ``_target_``.
        size: numbers of noise for a sample.

    Raises:
        ExperimentError: the size is less than 1, or ``of`` returns no data sets.
    """
    if not isinstance(of, tuple) or len(of) < 2:
        message = f"is a {type(of).__name__}; name a data function, e.g. pipeline.data.digits"
        raise ExperimentError.of("data.of", message)
    if size < 1:
        raise ExperimentError.of("data.size", f"is {size}; write the numbers of noise for a sample, at least 1")
    return tuple(None if part is None else _WithNoise(part, size) for part in of)


class _WithNoise(Dataset[tuple[Tensor, Any]]):
    """Samples of another dataset, each after noise from torch's global generator, which is seeded for each sample."""

    def __init__(self, dataset: Any, size: int) -> None:
        self._dataset, self._size = dataset, size

    def __len__(self) -> int:
        return len(self._dataset)

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        noise, sample = torch.randn(self._size), self._dataset[index]
        return noise, sample[0] if isinstance(sample, tuple | list) else sample

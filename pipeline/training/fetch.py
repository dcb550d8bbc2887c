"""Reading of a micro-batch's samples, in the training process or in a loader process."""

import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import Dataset, TensorDataset, default_collate

from pipeline.data.splits import Table
from pipeline.errors import ExperimentError, TrainingError
from pipeline.training.order import MicroBatch, mix
from pipeline.training.randomness import generators_kept, seed_all

Collate = Callable[[list[Any]], Any]
_CPU = torch.device("cpu")


def fetcher(dataset: Dataset[Any], *, collate: Collate | None, seed: int) -> "Rows | Samples":
    """Return the reader of a dataset's batches: whole rows for tables of tensors, else sample by sample."""
    if type(dataset) is TensorDataset and collate is None:
        return Rows(partial(_indexed, dataset.tensors))
    if isinstance(dataset, Table) and collate is None:
        return Rows(dataset.batch)
    return Samples(dataset, collate=collate, seed=seed)


class Rows(Dataset[Any]):
    """Reader of a dataset without randomness, indexed once for a whole batch instead of once for each sample."""

    def __init__(self, read: Callable[[list[int]], tuple[torch.Tensor, ...]]) -> None:
        self._read = read

    def __getitems__(self, micro_batch: MicroBatch) -> tuple[torch.Tensor, ...]:
        return self._read(micro_batch.indices)


def _indexed(tensors: tuple[torch.Tensor, ...], indices: list[int]) -> tuple[torch.Tensor, ...]:
    index = torch.from_numpy(np.array(indices))  # half the time of torch.tensor
    return tuple(_rows(tensor, index) for tensor in tensors)


def _rows(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return ``tensor[index]``; contiguous rows of 48 kB take a quarter of the time."""
    return tensor.index_select(0, index) if tensor.is_contiguous() else tensor[index]


class Samples(Dataset[Any]):
    """Reader of any map-style dataset, with random numbers keyed by (seed, epoch, sample).

    An augmentation draws the same numbers for a sample on any rank and in any loader process.
    """

    def __init__(self, dataset: Dataset[Any], *, collate: Collate | None, seed: int) -> None:
        self._dataset = dataset
        self._collate = collate
        self._seed = seed

    def __getitems__(self, micro_batch: MicroBatch) -> Any:
        samples = []
        with generators_kept():
            for index in micro_batch.indices:
                seed_all(mix(self._seed, "sample", micro_batch.epoch, index), device=_CPU)
                try:
                    samples.append(self._dataset[index])
                except Exception as error:  # noqa: BLE001 - user code may raise anything; reported with its traceback
                    return _Unusable(failed(f"sample {index} of the data can't be read", error))
            return collated(micro_batch.indices, samples, self._collate)  # which draws after the last sample


def collated(indices: list[int], samples: list[Any], collate: Collate | None) -> Any:
    """Make a batch of samples; an error in its place is raised by `usable`."""
    try:
        return (collate or default_collate)(samples)
    except Exception as error:  # noqa: BLE001 - user code may raise anything; reported with its traceback
        if collate is not None:
            return _Unusable(failed(f"loader.collate failed on samples {_some(indices)}", error))
        return _Unusable(_not_a_batch(indices, samples, error))


def failed(what: str, error: Exception) -> TrainingError:
    """Make the error for an exception of user code, with its traceback."""
    own = error.__traceback__.tb_next if error.__traceback__ else None
    text = "".join(traceback.format_exception(type(error), error, own))
    return TrainingError(f"{what}: {type(error).__name__}: {error}", text)


def _not_a_batch(indices: list[int], samples: list[Any], error: Exception) -> ExperimentError:
    shapes = sorted({_shape(sample) for sample in samples})
    ragged = isinstance(error, RuntimeError) and len(shapes) > 1  # otherwise torch's message is better
    seen = f"they are {' and '.join(shapes[:3])}" if ragged else f"{type(error).__name__}: {error}".splitlines()[0]
    return ExperimentError.of(
        "data",
        f"samples {_some(indices)} can't be stacked into a batch: {seen}; "
        "give all samples the same shape, or write a loader.collate for different sizes",
    )


def _shape(sample: Any) -> str:
    shaped = apply_to_collection(sample, (torch.Tensor, np.ndarray), lambda array: f"{tuple(array.shape)}")
    return str(shaped[0] if isinstance(shaped, tuple | list) and shaped else shaped)


def _some(indices: list[int]) -> str:
    shown = ", ".join(map(str, indices[:8]))
    return shown if len(indices) <= 8 else f"{shown} ... ({len(indices)} in all)"


class _Unusable:
    """An error in place of a batch; a raised exception would lose its type between processes."""

    def __init__(self, error: ExperimentError | TrainingError) -> None:
        # Popped when raised, which avoids a reference cycle, see `pipeline.training.loader`.
        self.errors: list[ExperimentError | TrainingError] = [error]


def usable(batch: Any) -> Any:
    """Return the batch, or raise the error in its place."""
    if isinstance(batch, _Unusable):
        raise batch.errors.pop()
    return batch

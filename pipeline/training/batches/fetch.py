"""Batches made of samples, and the errors and notes that travel with them between processes."""

import copy
import errno
import os
import shutil
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import Dataset, default_collate

from pipeline.errors import ExperimentError, TrainingError

Collate = Callable[[list[Any]], Any]
_SHM = "/dev/shm"  # noqa: S108 - only looked at


def collated(indices: list[int], samples: list[Any], collate: Collate | None) -> Any:
    """Make a batch of samples; an error in its place is raised by `usable`."""
    try:
        return (collate or default_collate)(samples)
    except ExperimentError as error:
        return Unusable(error)
    except Exception as error:  # noqa: BLE001 - user code may raise anything; reported with its traceback
        if is_out_of_shared_memory(error):
            return Unusable(make_shared_memory_error())
        missing = [index for index, sample in zip(indices, samples, strict=True) if sample is None]
        if missing and (collate is None or len(missing) == len(samples)):  # a collate may leave some out, see `rows`
            return Unusable(_missing(missing))
        if collate is not None:
            key = getattr(collate, "key", "loader.collate")
            return Unusable(failed(f"{key} failed on samples {format_indices(indices)}", error))
        return Unusable(_not_a_batch(indices, samples, error))


def is_out_of_shared_memory(error: Exception) -> bool:
    """Return True if a DataLoader worker found no room in /dev/shm, by the texts of torch's errors."""
    text = str(error)
    is_full = os.strerror(errno.ENOSPC) in text and "/torch_" in text
    return isinstance(error, RuntimeError) and (is_full or "out of shared memory" in text)


def make_shared_memory_error() -> ExperimentError:
    """Return the error for a full /dev/shm, with its size."""
    size = f" ({shutil.disk_usage(_SHM).total / 2**20:,.0f} MiB)" if os.path.isdir(_SHM) else ""  # noqa: PTH112
    return ExperimentError.of(
        "loader.num_workers",
        f"shared memory is full: {_SHM}{size} has no room for the batches of the DataLoader workers. Start the "
        "container with more, e.g. docker run --shm-size=2g. Or set loader.num_workers=0.",
    )


def _missing(indices: list[int]) -> ExperimentError:
    named = f"samples {format_indices(indices)} are" if len(indices) > 1 else f"sample {indices[0]} is"
    return ExperimentError.of(
        "data",
        f"{named} None. Leave unreadable samples out of the dataset, e.g. torch.utils.data.Subset(dataset, readable)",
    )


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
        f"samples {format_indices(indices)} can't be stacked into a batch: {seen}. Give all samples the same shape, or "
        "set loader.collate to a function that pads them.",
    )


def _shape(sample: Any) -> str:
    shaped = apply_to_collection(sample, (torch.Tensor, np.ndarray), lambda array: f"{tuple(array.shape)}")
    return str(shaped[0] if isinstance(shaped, tuple | list) and shaped else shaped)


def format_indices(indices: list[int]) -> str:
    """Return the first few indices as a text."""
    shown = ", ".join(map(str, indices[:8]))
    return shown if len(indices) <= 8 else f"{shown} ... ({len(indices)} in all)"


class Unusable:
    """An error in place of a batch; a raised exception would lose its type between processes."""

    def __init__(self, error: ExperimentError | TrainingError) -> None:
        # Popped when raised, which avoids a reference cycle, see `pipeline.training.batches.loader`.
        self.errors: list[ExperimentError | TrainingError] = [error]


class Noted(NamedTuple):
    """A batch with a note for the user."""

    batch: Any
    note: str


def usable(batch: Any, *, note: Callable[[str], None] = lambda _: None) -> Any:
    """Return the batch, or raise the error in its place; ``note`` is called with the note that it has."""
    if isinstance(batch, Noted):
        note(batch.note)
        batch = batch.batch
    if isinstance(batch, Unusable):
        raise batch.errors.pop()
    return batch


def copy_dataset(dataset: Any) -> Any:
    """Return a shallow copy of a dataset and of the datasets in it, or the dataset itself if it can't be copied.

    What the copy sets in its attributes, such as an open file, the original does not get.
    """
    try:
        made = copy.copy(dataset)
        for name, value in list(vars(made).items()):
            if isinstance(value, Dataset):
                vars(made)[name] = copy_dataset(value)
            elif isinstance(value, list) and all(isinstance(each, Dataset) for each in value):
                vars(made)[name] = [copy_dataset(each) for each in value]
    except Exception:  # noqa: BLE001 - user code may raise anything; then the original is read
        return dataset
    return made

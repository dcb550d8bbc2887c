"""Calls of ``set_epoch`` on map-style datasets, in each process that reads them."""

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch.utils.data import Dataset
from torch.utils.weak import WeakIdKeyDictionary

from pipeline.errors import TrainingError
from pipeline.training.fetch import Unusable, failed
from pipeline.training.order import MicroBatch
from pipeline.training.randomness import generators_kept, mix, seed_all

_CPU = torch.device("cpu")
_EPOCHS: MutableMapping[Any, int] = WeakIdKeyDictionary()
"""Epoch of each dataset in this process; readers share it, as two sets may be parts of one dataset."""


class BatchReader(Protocol):
    """Reader of a dataset's batches, see `pipeline.training.readers`."""

    def __getitems__(self, micro_batch: MicroBatch) -> Any: ...

    def read_from(self, dataset: Dataset[Any]) -> AbstractContextManager[object]:
        """Read another object inside the block, a copy of the dataset."""


class EpochReader(Dataset[Any]):
    """Reader that calls ``set_epoch`` of a dataset before it reads samples of another epoch."""

    def __init__(self, reader: BatchReader, dataset: Dataset[Any], *, seed: int) -> None:
        self._reader, self._seed = reader, seed
        self._datasets = find_datasets_with_epoch(dataset)

    def __getitems__(self, micro_batch: MicroBatch) -> Any:
        try:
            _set(self._datasets, micro_batch.epoch, seed=self._seed)
        except TrainingError as error:
            return Unusable(error)
        return self._reader.__getitems__(micro_batch)

    @contextmanager
    def read_from(self, dataset: Dataset[Any]) -> Iterator[None]:
        """Read a copy of the dataset inside the block, in the epoch that it has: the first one before any other."""
        _set([one for one in find_datasets_with_epoch(dataset) if one not in _EPOCHS], 0, seed=self._seed)
        own, self._datasets = self._datasets, []
        try:
            with self._reader.read_from(dataset):
                yield
        finally:
            self._datasets = own


def set_epoch(dataset: Dataset[Any], epoch: int, *, seed: int) -> None:
    """Set the epoch, counted from 0, of a dataset and of the datasets in it, where it differs.

    Raises:
        TrainingError: the dataset raised an exception.
    """
    _set(find_datasets_with_epoch(dataset), epoch, seed=seed)


def is_in_first_epoch(dataset: object) -> bool:
    """Return True if neither a dataset nor the datasets in it were set to an epoch after the first."""
    return not any(_EPOCHS.get(one) for one in find_datasets_with_epoch(dataset))


def find_datasets_with_epoch(dataset: Any, inside: tuple[int, ...] = ()) -> list[Any]:
    """Find the outermost datasets with a method ``set_epoch``: the dataset itself, or those in its attributes."""
    if _takes_epoch(dataset):
        return [dataset]
    found: list[Any] = []
    for value in getattr(dataset, "__dict__", {}).values():
        for one in _as_datasets(value):
            if id(one) not in (*inside, id(dataset)):
                found += find_datasets_with_epoch(one, (*inside, id(dataset)))
    return found


def _as_datasets(value: Any) -> Sequence[Any]:
    """Return the datasets that an attribute holds; empty if it holds something else."""
    value = list(value.values()) if isinstance(value, dict) else value
    values = value if isinstance(value, list | tuple) else [value]
    return values if all(_is_dataset(one) for one in values) else []


def _is_dataset(value: Any) -> bool:
    return isinstance(value, Dataset) or (_takes_epoch(value) and hasattr(type(value), "__getitem__"))


def _takes_epoch(value: Any) -> bool:
    try:
        return callable(getattr(value, "set_epoch", None))
    except Exception:  # noqa: BLE001 - of a user's __getattr__, e.g. a KeyError of a dict with attributes
        return False


def _set(datasets: Sequence[Any], epoch: int, *, seed: int) -> None:
    """Call ``set_epoch`` where the epoch differs, with the same random numbers in each process."""
    for dataset in datasets:
        if _EPOCHS.get(dataset) == epoch:
            continue
        with generators_kept():
            seed_all(mix(seed, "epoch", epoch), device=_CPU)
            try:
                dataset.set_epoch(epoch)
            except Exception as error:
                raise failed(f"set_epoch({epoch}) of the dataset failed", error) from error
        _EPOCHS[dataset] = epoch

"""Readers of a dataset's batches, in the training process or in a loader process."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from pipeline.data.splits import Table
from pipeline.errors import ExperimentError
from pipeline.training.batches.dataset_epoch import EpochReader, find_datasets_with_epoch
from pipeline.training.batches.fetch import Collate, Noted, Unusable, collated, failed, format_indices
from pipeline.training.batches.order import MicroBatch
from pipeline.training.ranks.fingerprints import fingerprint
from pipeline.training.ranks.randomness import (
    GENERATORS,
    drawn_from,
    drawn_since,
    generators_kept,
    mix,
    mixer,
    seed_generators,
    watch,
)


def fetcher(
    dataset: Dataset[Any], *, collate: Collate | None, seed: int, keeps_generators: bool = True
) -> "Rows | Samples | EpochReader":
    """Return the reader of a dataset's batches: whole rows for tables of tensors, else samples.

    Without ``keeps_generators`` reading leaves the global generators in any state, which saves 90 µs a batch.
    """
    reader: Rows | Samples
    if type(dataset) is TensorDataset and collate is None:
        reader = Rows(partial(_indexed, dataset.tensors))
    elif isinstance(dataset, Table) and collate is None:
        reader = Rows(dataset.batch)
    else:
        reader = Samples(dataset, collate=collate, seed=seed, keeps_generators=keeps_generators)
    return EpochReader(reader, dataset, seed=seed) if find_datasets_with_epoch(dataset) else reader


class Rows(Dataset[Any]):
    """Reader of a dataset without randomness, indexed once for a whole batch instead of once for each sample."""

    def __init__(self, read: Callable[[list[int]], tuple[torch.Tensor, ...]]) -> None:
        self._read = read

    def __getitems__(self, micro_batch: MicroBatch) -> tuple[torch.Tensor, ...]:
        return self._read(micro_batch.indices)

    def read_from(self, dataset: Dataset[Any]) -> AbstractContextManager[object]:
        """Do nothing: tables have no files to open."""
        del dataset
        return nullcontext()


def _indexed(tensors: tuple[torch.Tensor, ...], indices: list[int]) -> tuple[torch.Tensor, ...]:
    index = torch.from_numpy(np.array(indices))  # half the time of torch.tensor
    return tuple(_rows(tensor, index) for tensor in tensors)


def _rows(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return ``tensor[index]``; contiguous rows of 48 kB take a quarter of the time."""
    return tensor.index_select(0, index) if tensor.is_contiguous() else tensor[index]


class Samples(Dataset[Any]):
    """Reader of any map-style dataset, with random numbers keyed by (seed, epoch, sample).

    An augmentation draws the same numbers for a sample on any rank, in any loader process and in a resumed training.
    Most datasets draw none, and seeding for each sample would take longer than reading it. So a batch is read with the
    generators in a known state. If it has drawn from some of them, it is read again with these seeded for each sample,
    as all later batches are. What a sample draws therefore doesn't depend on when the dataset was first seen to draw.
    """

    def __init__(self, dataset: Dataset[Any], *, collate: Collate | None, seed: int, keeps_generators: bool) -> None:
        self._dataset, self._collate, self._seed = dataset, collate, seed
        self._keeps_generators = keeps_generators
        self._has_batches = _has_batches(dataset)
        self._is_new = True
        self._draws: tuple[str, ...] = ()
        """Generators that the dataset was seen to draw from."""
        self._collate_draws: tuple[str, ...] = ()
        """Other generators that the collate function was seen to draw from."""
        self._note = ""
        self._is_noted = False

    def __getitems__(self, micro_batch: MicroBatch) -> Any:
        with generators_kept() if self._keeps_generators else nullcontext():
            # Only samples that are read one by one can be seeded; most datasets are first asked for a single sample.
            is_seeded = self._is_new and (len(micro_batch.indices) == 1 or not self._has_batches)
            self._is_new = False
            batch = self._first(micro_batch) if is_seeded else self._watched(micro_batch)
        if self._note and not self._is_noted:
            self._is_noted = True
            return Noted(batch, self._note)
        return batch

    @contextmanager
    def read_from(self, dataset: Dataset[Any]) -> Iterator[None]:
        """Read another object inside the block, a copy of the dataset."""
        own, self._dataset = self._dataset, dataset
        try:
            yield
        finally:
            self._dataset = own

    def _first(self, micro_batch: MicroBatch) -> Any:
        """Read the first batch with all generators seeded, as most that draw do so here, and are then read once."""
        samples = self._seeded(micro_batch, GENERATORS)
        if isinstance(samples, Unusable):
            return samples
        last = self._seed_of_last(micro_batch)
        self._draws = self._with_unseen(drawn_since(last), micro_batch, samples)
        batch = collated(micro_batch.indices, samples, self._collate)  # which draws after the last sample
        self._collate_draws = _without(drawn_since(last), self._draws)
        return batch

    def _with_unseen(self, draws: tuple[str, ...], micro_batch: MicroBatch, samples: Any) -> tuple[str, ...]:
        """Return all generators if the last sample depends on others than those that have moved, else these.

        Code restores a generator that it has drawn from, or makes one of its own from ``torch.initial_seed()``. A
        private generator gives other samples with equal seeds, too, and needs none.
        """
        last, own = micro_batch.indices[-1:], self._seed_of_last(micro_batch)

        def read_with(seed: int) -> str:
            seed_generators(own, draws)
            seed_generators(seed, _without(GENERATORS, draws))
            return fingerprint(self._read(last))

        first = fingerprint(samples[-1:] if isinstance(samples, list | tuple) else samples)
        with generators_kept():  # a collate function draws after the last sample
            depends = read_with(own ^ 1) != first and read_with(own) == first
        return GENERATORS if depends else draws

    def _watched(self, micro_batch: MicroBatch) -> Any:
        """Read a batch until it has drawn from no generators but those that are seeded.

        A generator is seeded once it was found twice: another thread may draw, e.g. an upload that waits to try again.
        """
        suspected: set[str] = set()
        while True:
            undrawn = _without(GENERATORS, self._draws)
            watch(undrawn)
            samples = self._samples(micro_batch)
            if found := drawn_from(undrawn):
                self._draws += _confirmed(found, suspected)
                continue
            if isinstance(samples, Unusable):
                return samples
            batch, found = self._collated(micro_batch, samples, undrawn=undrawn)
            if not found:
                return batch
            self._collate_draws += _confirmed(found, suspected)

    def _collated(
        self, micro_batch: MicroBatch, samples: list[Any], *, undrawn: tuple[str, ...]
    ) -> tuple[Any, tuple[str, ...]]:
        """Return a batch, and the generators that the collate function drew from, of those that are not seeded."""
        if self._collate is None:  # torch's own draws nothing
            return collated(micro_batch.indices, samples, None), ()
        draws = _without(self._collate_draws, self._draws)
        undrawn = _without(undrawn, draws)
        watch(undrawn)
        seed_generators(self._seed_of_last(micro_batch), draws)
        batch = collated(micro_batch.indices, samples, self._collate)
        return batch, drawn_from(undrawn)

    def _samples(self, micro_batch: MicroBatch) -> "list[Any] | Unusable":
        if not self._draws:
            return self._read(micro_batch.indices)
        if self._has_batches and not self._note and len(micro_batch.indices) > 1:
            return self._compared(micro_batch)
        return self._seeded(micro_batch, self._draws)

    def _read(self, indices: list[int]) -> "list[Any] | Unusable":
        return self._at_once(indices) if self._has_batches else self._each(indices)

    def _each(self, indices: list[int], *, seed: Callable[[int], None] | None = None) -> "list[Any] | Unusable":
        dataset, samples, index = self._dataset, [], -1
        try:
            for index in indices:
                if seed is not None:
                    seed(index)
                samples.append(dataset[index])
        except Exception as error:  # noqa: BLE001 - user code may raise anything; reported with its traceback
            return Unusable(failed(f"sample {index} of the data can't be read", error))
        return samples

    def _seeded(self, micro_batch: MicroBatch, generators: tuple[str, ...]) -> "list[Any] | Unusable":
        """Read samples one by one, with these generators seeded for each."""
        seed_of, samples = mixer(self._seed, "sample", micro_batch.epoch), list[Any]()

        def seed(index: int) -> None:
            seed_generators(seed_of(index), generators)

        if not self._has_batches:
            return self._each(micro_batch.indices, seed=seed)
        for index in micro_batch.indices:
            seed(index)
            read = self._at_once([index])
            if isinstance(read, Unusable) or len(micro_batch.indices) == 1:
                return read
            samples += read
        return samples

    def _at_once(self, indices: list[int]) -> "list[Any] | Unusable":
        """Read samples by the dataset's ``__getitems__``, as torch's DataLoader does."""
        try:
            samples = self._dataset.__getitems__(indices)  # type: ignore[attr-defined] # see `_has_batches`
        except Exception as error:  # noqa: BLE001 - user code may raise anything; reported with its traceback
            return Unusable(failed(f"samples {format_indices(indices)} of the data can't be read", error))
        is_list = isinstance(samples, list | tuple) and len(samples) == len(indices)
        if not is_list and (self._collate is None or self._draws):
            seen = type(samples).__name__ + (f" of {len(samples)}" if hasattr(samples, "__len__") else "")
            message = f"__getitems__ returned a {seen} for {len(indices)} samples; return a list with an item for each"
            return Unusable(ExperimentError.of("data", message))
        return samples  # type: ignore[no-any-return] # a custom collate function may take a batch of any type

    def _compared(self, micro_batch: MicroBatch) -> "list[Any] | Unusable":
        """Read samples at once, only for the time that it takes, and one by one; note both paces."""
        times = [time.perf_counter()]
        samples = self._seeded(micro_batch, self._draws)
        times.append(time.perf_counter())
        with generators_kept():  # a collate function draws after the last sample
            self._at_once(micro_batch.indices)
        times.append(time.perf_counter())
        alone, at_once = (len(micro_batch.indices) / (end - begin) for begin, end in pairwise(times))
        self._note = (
            "data: the dataset draws random numbers, so __getitems__ gets one sample at a time, with a seed for each. "
            f"This reads {alone:,.0f} samples/s instead of {at_once:,.0f} samples/s with whole batches. To read whole "
            "batches, draw random numbers in loader.collate instead."
        )
        return samples

    def _seed_of_last(self, micro_batch: MicroBatch) -> int:
        return mix(self._seed, "sample", micro_batch.epoch, micro_batch.indices[-1])


def _has_batches(dataset: Any) -> bool:
    """Return True if a dataset reads a batch at once, and not past a ``__getitem__`` of a subclass.

    A Subset has the method even if the dataset in it has not.
    """
    while type(dataset) is Subset:
        dataset = dataset.dataset
    methods = ({"__getitem__", "__getitems__"} & vars(owner).keys() for owner in type(dataset).__mro__)
    return "__getitems__" in next(filter(None, methods), ())


def _confirmed(found: tuple[str, ...], suspected: set[str]) -> tuple[str, ...]:
    """Return the names that were found before; suspect all."""
    confirmed = tuple(name for name in found if name in suspected)
    suspected.update(found)
    return confirmed


def _without(names: tuple[str, ...], others: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in others) if others else names

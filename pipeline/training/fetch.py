"""Reading of a micro-batch's samples, in the training process or in a loader process."""

import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from pipeline.data.splits import Table
from pipeline.errors import ExperimentError, TrainingError
from pipeline.training.order import MicroBatch, mix, mixer
from pipeline.training.randomness import GENERATORS, drawn_from, drawn_since, generators_kept, seed_generators, watch
from pipeline.training.rank_equality import fingerprint

Collate = Callable[[list[Any]], Any]


def fetcher(
    dataset: Dataset[Any], *, collate: Collate | None, seed: int, keeps_generators: bool = True
) -> "Rows | Samples":
    """Return the reader of a dataset's batches: whole rows for tables of tensors, else samples.

    Without ``keeps_generators`` reading leaves the global generators in any state, which saves 90 µs a batch.
    """
    if type(dataset) is TensorDataset and collate is None:
        return Rows(partial(_indexed, dataset.tensors))
    if isinstance(dataset, Table) and collate is None:
        return Rows(dataset.batch)
    return Samples(dataset, collate=collate, seed=seed, keeps_generators=keeps_generators)


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
            return _Noted(batch, self._note)
        return batch

    def _first(self, micro_batch: MicroBatch) -> Any:
        """Read the first batch with all generators seeded, as most that draw do so here, and are then read once."""
        samples = self._seeded(micro_batch, GENERATORS)
        if isinstance(samples, _Unusable):
            return samples
        last = self._seed_of_last(micro_batch)
        self._draws = drawn_since(last) or self._drawn_unseen(micro_batch, samples)
        batch = collated(micro_batch.indices, samples, self._collate)  # which draws after the last sample
        self._collate_draws = _without(drawn_since(last), self._draws)
        return batch

    def _drawn_unseen(self, micro_batch: MicroBatch, samples: Any) -> tuple[str, ...]:
        """Return all generators if the last sample depends on them though none has moved, else none.

        Code restores a generator that it has drawn from, or makes one of its own from ``torch.initial_seed()``. A
        private generator gives other samples with equal seeds, too, and needs none.
        """
        last, own = micro_batch.indices[-1:], self._seed_of_last(micro_batch)

        def read_with(seed: int) -> str:
            seed_generators(seed, GENERATORS)
            return fingerprint(self._read(last))

        first = fingerprint(samples[-1:] if isinstance(samples, list | tuple) else samples)
        depends = read_with(own ^ 1) != first and read_with(own) == first
        seed_generators(own, GENERATORS)
        return GENERATORS if depends else ()

    def _watched(self, micro_batch: MicroBatch) -> Any:
        while True:
            unseen = _without(GENERATORS, self._draws)
            watch(unseen)
            samples = self._samples(micro_batch)
            if found := drawn_from(unseen):
                self._draws += found
                continue
            if isinstance(samples, _Unusable):
                return samples
            if self._collate is None:
                return collated(micro_batch.indices, samples, None)
            collate_draws = _without(self._collate_draws, self._draws)
            unseen = _without(unseen, collate_draws)
            watch(unseen)
            seed_generators(self._seed_of_last(micro_batch), collate_draws)
            batch = collated(micro_batch.indices, samples, self._collate)
            if not (found := drawn_from(unseen)):
                return batch
            self._collate_draws += found

    def _samples(self, micro_batch: MicroBatch) -> "list[Any] | _Unusable":
        if not self._draws:
            return self._read(micro_batch.indices)
        if self._has_batches and not self._note and len(micro_batch.indices) > 1:
            return self._compared(micro_batch)
        return self._seeded(micro_batch, self._draws)

    def _read(self, indices: list[int]) -> "list[Any] | _Unusable":
        return self._at_once(indices) if self._has_batches else self._each(indices)

    def _each(self, indices: list[int]) -> "list[Any] | _Unusable":
        dataset, samples, index = self._dataset, [], -1
        try:
            for index in indices:
                samples.append(dataset[index])
        except Exception as error:  # noqa: BLE001 - user code may raise anything; reported with its traceback
            return _Unusable(failed(f"sample {index} of the data can't be read", error))
        return samples

    def _seeded(self, micro_batch: MicroBatch, generators: tuple[str, ...]) -> "list[Any] | _Unusable":
        """Read samples one by one, with these generators seeded for each."""
        seed_of, samples = mixer(self._seed, "sample", micro_batch.epoch), list[Any]()
        if len(micro_batch.indices) == 1:
            seed_generators(seed_of(micro_batch.indices[0]), generators)
            return self._read(micro_batch.indices)
        for index in micro_batch.indices:
            seed_generators(seed_of(index), generators)
            read = self._read([index])
            if isinstance(read, _Unusable):
                return read
            samples += read
        return samples

    def _at_once(self, indices: list[int]) -> "list[Any] | _Unusable":
        """Read samples by the dataset's ``__getitems__``, as torch's DataLoader does."""
        try:
            samples = self._dataset.__getitems__(indices)  # type: ignore[attr-defined] # see `_has_batches`
        except Exception as error:  # noqa: BLE001 - user code may raise anything; reported with its traceback
            return _Unusable(failed(f"samples {_some(indices)} of the data can't be read", error))
        is_list = isinstance(samples, list | tuple) and len(samples) == len(indices)
        if not is_list and (self._collate is None or self._draws):
            seen = type(samples).__name__ + (f" of {len(samples)}" if hasattr(samples, "__len__") else "")
            message = f"__getitems__ returned a {seen} for {len(indices)} samples. Return a list with one item for each"
            return _Unusable(ExperimentError.of("data", message))
        return samples  # type: ignore[no-any-return] # a custom collate function may take a batch of any type

    def _compared(self, micro_batch: MicroBatch) -> "list[Any] | _Unusable":
        """Read samples at once, only for the time that it takes, and one by one; note both paces."""
        times = [time.perf_counter()]
        self._at_once(micro_batch.indices)
        times.append(time.perf_counter())
        samples = self._seeded(micro_batch, self._draws)
        times.append(time.perf_counter())
        at_once, alone = (len(micro_batch.indices) / (end - begin) for begin, end in pairwise(times))
        self._note = (
            "data: the dataset draws random numbers, so __getitems__ gets one sample at a time, with a seed for each. "
            f"This reads {alone:,.0f} samples/s; whole batches would be read at {at_once:,.0f} samples/s. "
            "To read whole batches, draw in loader.collate instead"
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


def _without(names: tuple[str, ...], others: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in others) if others else names


def collated(indices: list[int], samples: list[Any], collate: Collate | None) -> Any:
    """Make a batch of samples; an error in its place is raised by `usable`."""
    try:
        return (collate or default_collate)(samples)
    except Exception as error:  # noqa: BLE001 - user code may raise anything; reported with its traceback
        missing = [index for index, sample in zip(indices, samples, strict=True) if sample is None]
        if missing and (collate is None or len(missing) == len(samples)):  # a collate may leave some out, see `rows`
            return _Unusable(_missing(missing))
        if collate is not None:
            return _Unusable(failed(f"loader.collate failed on samples {_some(indices)}", error))
        return _Unusable(_not_a_batch(indices, samples, error))


def _missing(indices: list[int]) -> ExperimentError:
    named = f"samples {_some(indices)} are" if len(indices) > 1 else f"sample {indices[0]} is"
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


class _Noted(NamedTuple):
    """A batch with a note for the user."""

    batch: Any
    note: str


def usable(batch: Any, *, note: Callable[[str], None] = lambda _: None) -> Any:
    """Return the batch, or raise the error in its place; ``note`` is called with the note that it has."""
    if isinstance(batch, _Noted):
        note(batch.note)
        batch = batch.batch
    if isinstance(batch, _Unusable):
        raise batch.errors.pop()
    return batch

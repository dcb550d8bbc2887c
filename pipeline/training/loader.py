"""From the order of samples to batches on the device."""

import random
import traceback
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from pipeline.config.schema import Loader
from pipeline.errors import ExperimentError, TrainingError
from pipeline.training.order import Draw, mix

Collate = Callable[[list[Any]], Any]


class BatchLoader:
    """A DataLoader that serves any sequence of draws, epoch after epoch, with the same loader processes."""

    def __init__(
        self, dataset: Dataset[Any], *, options: Loader, collate: Collate | None, seed: int, device: torch.device
    ) -> None:
        self._served = _Replay()
        self._fetcher = _fetcher(dataset, collate=collate, seed=seed)
        workers = options.num_workers
        self._loader: DataLoader[Any] = DataLoader(
            self._fetcher,
            batch_sampler=cast(Any, self._served),  # torch wants index lists, but only hands on what it is given
            collate_fn=_as_is,
            num_workers=workers,
            pin_memory=device.type == "cuda" if options.pin_memory == "auto" else options.pin_memory,
            persistent_workers=options.persistent_workers and workers > 0,
            prefetch_factor=options.prefetch_factor if workers else None,
            generator=torch.Generator(),  # each iteration draws a number, which the model's generator would lack
        )

    def batches(self, draws: Iterable[Draw]) -> Iterator[tuple[Draw, Any]]:
        """Each draw with its batch, on the CPU.

        Raises:
            ExperimentError: samples that can't be stacked into a batch.
            TrainingError: the dataset raised; names the sample and holds the dataset's own traceback.
        """
        self._served.draws = list(draws)
        for draw, batch in zip(self._served.draws, self._loader, strict=True):
            yield draw, _usable(batch)

    def read(self, indices: list[int]) -> Any:
        """A few samples as one batch, on the CPU, read in this process as in epoch 0; raises as `batches` does."""
        return _usable(self._fetcher.__getitems__(Draw(0, indices, weight=1.0, is_last=True)))


class _Replay:
    """The batch sampler: hands out the loader's current draws.

    It doesn't know the loader: in a cycle of references, loader processes would go on until Python's collector finds
    it, which may happen in a process that was forked since and whose files are others.
    """

    def __init__(self) -> None:
        self.draws: list[Draw] = []

    def __iter__(self) -> Iterator[Draw]:
        return iter(self.draws)

    def __len__(self) -> int:
        return len(self.draws)


class _Unusable:
    """An error instead of a batch. An exception would lose its type on its way out of a loader process."""

    def __init__(self, error: ExperimentError | TrainingError) -> None:
        self.errors: list[ExperimentError | TrainingError] = [error]  # popped when raised: see `_Replay` on cycles


def _usable(batch: Any) -> Any:
    if isinstance(batch, _Unusable):
        raise batch.errors.pop()
    return batch


def _as_is(batch: Any) -> Any:
    return batch


def _fetcher(dataset: Dataset[Any], *, collate: Collate | None, seed: int) -> "_Rows | _Samples":
    if type(dataset) is TensorDataset and collate is None:
        return _Rows(dataset.tensors)
    return _Samples(dataset, collate=collate, seed=seed)


class _Rows(Dataset[Any]):
    """A TensorDataset, indexed once for a whole batch instead of once for each sample."""

    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self._tensors = tensors

    def __getitems__(self, draw: Draw) -> tuple[torch.Tensor, ...]:
        index = torch.tensor(draw.indices)
        return tuple(tensor[index] for tensor in self._tensors)


class _Samples(Dataset[Any]):
    """Any map-style dataset, with the randomness of each sample keyed by (seed, epoch, sample).

    So an augmentation draws the same numbers for a sample whichever rank or loader process computes it.
    """

    def __init__(self, dataset: Dataset[Any], *, collate: Collate | None, seed: int) -> None:
        self._dataset = dataset
        self._collate = collate
        self._seed = seed

    def __getitems__(self, draw: Draw) -> Any:
        samples = []
        with _own_randomness():
            for index in draw.indices:
                _seed_all(mix(self._seed, "sample", draw.epoch, index))
                try:
                    samples.append(self._dataset[index])
                except Exception as error:  # noqa: BLE001 - user code may raise anything; reported with its traceback
                    return _Unusable(_failed(f"sample {index} of the data can't be read", error))
            return self._batch(draw.indices, samples)  # random numbers of a collate follow the last sample's

    def _batch(self, indices: list[int], samples: list[Any]) -> Any:
        try:
            return (self._collate or default_collate)(samples)
        except Exception as error:  # noqa: BLE001 - user code may raise anything; reported with its traceback
            if self._collate is not None:
                return _Unusable(_failed(f"loader.collate failed on samples {_some(indices)}", error))
            return _Unusable(_not_a_batch(indices, samples, error))


@contextmanager
def _own_randomness() -> Iterator[None]:
    """Leave the generators as they were: with num_workers=0 the model draws its dropout from the same ones."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def _seed_all(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _failed(what: str, error: Exception) -> TrainingError:
    own = error.__traceback__.tb_next if error.__traceback__ else None
    text = "".join(traceback.format_exception(type(error), error, own))
    return TrainingError(f"{what}: {type(error).__name__}: {error}", text)


def _not_a_batch(indices: list[int], samples: list[Any], error: Exception) -> ExperimentError:
    shapes = sorted({_shape(sample) for sample in samples})
    ragged = isinstance(error, RuntimeError) and len(shapes) > 1  # else torch says it better
    seen = f"they are {' and '.join(shapes[:3])}" if ragged else f"{type(error).__name__}: {error}".splitlines()[0]
    return ExperimentError.of(
        "data",
        f"samples {_some(indices)} can't be stacked into a batch: {seen}; "
        "make all samples alike, or write loader.collate for samples of different sizes",
    )


def _shape(sample: Any) -> str:
    shaped = apply_to_collection(sample, (torch.Tensor, np.ndarray), lambda array: f"{tuple(array.shape)}")
    return str(shaped[0] if isinstance(shaped, tuple | list) and shaped else shaped)


def _some(indices: list[int]) -> str:
    shown = ", ".join(map(str, indices[:8]))
    return shown if len(indices) <= 8 else f"{shown} ... ({len(indices)} in all)"


def to_device(batch: Any, *, device: torch.device, dtype: torch.dtype | None) -> Any:
    """The batch on the device; floating-point tensors in ``dtype`` if one is given. Copies don't block the host."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        wanted = dtype if tensor.is_floating_point() else None
        return tensor.to(device, wanted, non_blocking=True)

    return apply_to_collection(batch, torch.Tensor, move)


def length(dataset: Dataset[Any], *, what: str) -> int:
    """Samples in a map-style dataset.

    Raises:
        ExperimentError: it is empty, or not map-style.
    """
    indexed = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)  # which inherits one
    if not (indexed and hasattr(dataset, "__len__")):
        raise ExperimentError.of(
            "data",
            f"the {what} set is {_article(type(dataset).__name__)}; it needs __len__ and __getitem__ (map-style)",
        )
    if not (samples := len(cast(Sized, dataset))):
        raise ExperimentError.of("data", f"the {what} set is empty; it needs at least one sample")
    return samples


def _article(noun: str) -> str:
    return f"an {noun}" if noun[:1].upper() in "AEIOU" else f"a {noun}"

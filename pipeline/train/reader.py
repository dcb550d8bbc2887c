"""Reading of micro-batches of a map-style dataset, in the training process or in a loader process.

Random numbers of a sample are keyed by (seed, epoch, sample): equal on any rank, in any process, in a resumed training.
Seeding takes longer than reading most samples. So each sample is seeded, or none is: as ``loader.random`` says, or as a
few samples showed when the training was built. A dataset that draws later is refused.
"""

import copy
import errno
import os
import shutil
import traceback
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate, get_worker_info
from torch.utils.weak import WeakIdKeyDictionary

from pipeline.data.splits import Table
from pipeline.errors import ExperimentError, TrainingError
from pipeline.train.order import MicroBatch, has_drawn_since, keep_generators, mix, mixer, seed_all
from pipeline.train.same import fingerprint

Collate = Callable[[list[Any]], Any]
_CHECKED, _EVERY = 16, 64
"""Batches that are watched for random numbers at first, and then one of so many; watching takes 50 us."""
_WATCHED = 0x9E3779B9
"""Seed of watched generators. User code that seeds with this number, of all numbers, is not noticed."""
_SHM = "/dev/shm"  # noqa: S108 - only looked at
_EPOCHS: MutableMapping[Any, int] = WeakIdKeyDictionary()
"""Epoch of each dataset in this process; readers share it, as two sets may be parts of one dataset."""


class Collation:
    """Makes batches of samples: by torch's default, or by a function whose random numbers belong to the last sample.

    A collate function may draw in training, e.g. to mix the samples of a batch. In an evaluation it may only if the
    experiment says so with ``loader.evaluation_collate``, because the result is random.
    """

    def __init__(self, function: Collate | None = None, *, key: str = "loader.collate", is_fixed: bool = False) -> None:
        """Wrap a function, by its key in the experiment file; ``is_fixed`` rejects random numbers."""
        self.function, self.key, self.is_fixed = function, key, is_fixed
        self.draws = False
        """True if the function was seen to draw random numbers, twice in sequence: another thread may draw once."""
        self._calls = self._found = 0

    def __call__(self, indices: list[int], samples: Any, *, seed: int, epoch: int) -> Any:
        """Return a batch."""
        if self.function is None:
            return self._call_function(indices, samples)
        own = mix(seed, "collate", epoch, indices[-1])
        seed_all(own)
        self._calls += 1
        batch = self._call_function(indices, samples)
        if _is_watched(self._calls):
            self._found = self._found + 1 if any(has_drawn_since(own)) else 0
            self.draws |= self._found > 1
            self.check()
        return batch

    def check(self) -> None:
        """Raise ExperimentError if the function was seen to draw random numbers, which are rejected."""
        if self.is_fixed and self.draws:
            raise ExperimentError.of(
                self.key,
                "draws random numbers. Without loader.evaluation_collate it also makes the batches of validation and "
                "test sets, so their results are random. Set loader.evaluation_collate, e.g. to {_target_: "
                "torch.utils.data.default_collate}. To keep the random numbers, set it to the component of "
                "loader.collate.",
            )

    def _call_function(self, indices: list[int], samples: Any) -> Any:
        try:
            return self.function(samples) if self.function is not None else _stack(samples)
        except ExperimentError:
            raise
        except Exception as error:  # user code may raise anything; reported with its traceback
            if is_out_of_shared_memory(error):
                raise make_shared_memory_error() from error
            missing = [number for number, sample in zip(indices, samples, strict=False) if sample is None]
            if missing and (self.function is None or len(missing) == len(samples)):  # it may leave some out
                named = f"samples {format_indices(missing)} are" if len(missing) > 1 else f"sample {missing[0]} is"
                raise ExperimentError.of(
                    "data",
                    f"{named} None. Leave unreadable samples out of the dataset, e.g. "
                    "torch.utils.data.Subset(dataset, readable)",
                ) from error
            if self.function is not None:
                raise make_read_error(f"{self.key} failed on samples {format_indices(indices)}", error) from error
            shapes = sorted({_shape(sample) for sample in samples})
            ragged = isinstance(error, RuntimeError) and len(shapes) > 1  # otherwise torch's message is better
            seen = f"they are {' and '.join(shapes[:3])}" if ragged else f"{type(error).__name__}: {error}"
            raise ExperimentError.of(
                "data",
                f"samples {format_indices(indices)} can't be stacked into a batch: {seen.splitlines()[0]}. Give all "
                "samples the same shape, or set loader.collate to a function that pads them.",
            ) from error


class Reader(Dataset[Any]):
    """Reader of a map-style dataset; whole rows of tables of tensors, without random numbers."""

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        collate: Collation,
        random: bool | None = None,
        keeps_generators: bool = True,
    ) -> None:
        """Prepare to read; ``random`` is ``loader.random``, and None needs a `probe`.

        Without ``keeps_generators`` reading leaves the global generators in any state, which saves 90 us a batch.
        """
        self.dataset, self.seed, self.collate, self._keeps = dataset, seed, collate, keeps_generators
        self.draws = (bool(random), bool(random))
        """True if torch's generator is seeded for each sample, and if Python's and NumPy's are, too."""
        self._is_known = random is not None
        self._rows = _reader_of_rows(dataset) if collate.function is None else None
        self._has_batches = _has_batches(dataset)
        self._with_epoch = find_datasets_with_epoch(dataset)
        self._batches = 0

    def probe(self, samples: int) -> None:
        """Find out from three samples, read twice, if the dataset or the collate function draws random numbers."""
        indices, found = sorted({0, samples // 2, samples - 1}), [(False, False)] * 2
        if self._rows is not None:
            return
        prints, batches = set[str](), set[str]()
        with keep_generators():
            for number in range(2):
                with suppress(ExperimentError, TrainingError):  # training reports the error if it reads the sample
                    set_epoch(self._with_epoch, 0, seed=self.seed)
                    seed_all(_WATCHED + number)
                    try:
                        read = self._read_at_once(indices) if self._has_batches else self._each(indices)
                    finally:
                        found[number] = has_drawn_since(_WATCHED + number)
                    prints.add(fingerprint(read))
                    batches.add(fingerprint(self.collate(indices, read, seed=self.seed + number, epoch=0)))
        self.collate.draws |= len(batches) > len(prints)  # it hides its draws, as below
        self.collate.check()
        if not self._is_known:
            torchs, others = (all(seen) for seen in zip(*found, strict=True))  # another thread may have drawn once
            # Other samples with other seeds, but no draw: code restores a generator, or makes its own from the seed.
            is_hidden = len(prints) > 1 and not torchs and not others
            self.draws = torchs or others or is_hidden, others or is_hidden

    def __getitem__(self, part: MicroBatch) -> Any:
        """Return a batch, or the error instead, see `unwrap`."""
        try:
            if not self._keeps:
                return self.batch(part)
            with keep_generators():
                return self.batch(part)
        except (ExperimentError, TrainingError) as error:
            return Unusable(error)

    def batch(self, part: MicroBatch, *, is_sample: bool = False) -> Any:
        """Return a batch; of one that is only looked at, ``set_epoch`` is called only if there is no epoch yet."""
        if self._with_epoch:
            set_epoch(self._with_epoch, part.epoch, seed=self.seed, only_new=is_sample)
        if self._rows is not None:
            return self._rows(part.indices)
        self._batches += not is_sample
        watches = not (is_sample or self._is_known or all(self.draws)) and _is_watched(self._batches)
        samples = self._read_watched(part) if watches else self._read(part)
        return self.collate(part.indices, samples, seed=self.seed, epoch=part.epoch)

    def _read_watched(self, part: MicroBatch) -> Any:
        for _ in range(2):  # another thread may draw once, e.g. an upload that waits to try again
            seed_all(_WATCHED)
            samples = self._read(part)
            found = has_drawn_since(_WATCHED)
            if found[0] <= self.draws[0] and found[1] <= self.draws[1]:
                return samples
        raise ExperimentError.of(
            "data",
            f"samples {format_indices(part.indices)} draw random numbers, but the samples that were read first did "
            "not. Set loader.random: true, so that each sample has its own random numbers on any number of workers.",
        )

    def _read(self, part: MicroBatch) -> Any:
        indices = part.indices
        if not any(self.draws):
            return self._read_at_once(indices) if self._has_batches else self._each(indices)
        seed_of, samples = mixer(self.seed, "sample", part.epoch), list[Any]()
        for index in indices:
            seed_all(seed_of(index), others=self.draws[1])
            samples += self._read_at_once([index]) if self._has_batches else self._each([index])
        return samples

    def _each(self, indices: list[int]) -> list[Any]:
        dataset, samples, index = self.dataset, list[Any](), -1
        try:
            for index in indices:
                samples.append(dataset[index])
        except Exception as error:  # user code may raise anything; reported with its traceback
            raise make_read_error(f"sample {index} of the data can't be read", error) from error
        return samples

    def _read_at_once(self, indices: list[int]) -> Any:
        """Read samples by the dataset's ``__getitems__``, as torch's DataLoader does."""
        try:
            samples = self.dataset.__getitems__(indices)
        except Exception as error:
            raise make_read_error(f"samples {format_indices(indices)} of the data can't be read", error) from error
        is_list = isinstance(samples, list | tuple) and len(samples) == len(indices)
        if not is_list and (self.collate.function is None or any(self.draws)):  # a function may take any type
            seen = type(samples).__name__ + (f" of {len(samples)}" if hasattr(samples, "__len__") else "")
            message = f"__getitems__ returned a {seen} for {len(indices)} samples; return a list with an item for each"
            raise ExperimentError.of("data", message)
        return samples


class Unusable:
    """An error in place of a batch; a raised exception would lose its type between processes."""

    def __init__(self, error: ExperimentError | TrainingError) -> None:
        # Popped when raised, which avoids a reference cycle, see `pipeline.train.loader`.
        self.errors = [error]


def unwrap(batch: Any) -> Any:
    """Return a batch, or raise the error that is there instead."""
    if isinstance(batch, Unusable):
        raise batch.errors.pop()
    return batch


def set_epoch(datasets: Sequence[Any], epoch: int, *, seed: int, only_new: bool = False) -> None:
    """Call ``set_epoch`` where the epoch differs, with the same random numbers in each process."""
    for dataset in datasets:
        if (known := _EPOCHS.get(dataset)) == epoch or (only_new and known is not None):
            continue
        with keep_generators():
            seed_all(mix(seed, "epoch", epoch))
            try:
                dataset.set_epoch(epoch)
            except Exception as error:
                raise make_read_error(f"set_epoch({epoch}) of the dataset failed", error) from error
        _EPOCHS[dataset] = epoch


def find_datasets_with_epoch(dataset: Any) -> list[Any]:
    """Return the dataset if it has ``set_epoch``, or those with it that it holds as torch's own wrappers do."""
    if callable(getattr(dataset, "set_epoch", None)):
        return [dataset]
    inner = getattr(dataset, "datasets", [getattr(dataset, "dataset", None)])
    inner = inner if isinstance(inner, list | tuple) else []
    return [one for each in inner if isinstance(each, Dataset) for one in find_datasets_with_epoch(each)]


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


def make_read_error(what: str, error: Exception) -> TrainingError:
    """Make the error for an exception of user code, with its traceback."""
    own = error.__traceback__.tb_next if error.__traceback__ else None
    text = "".join(traceback.format_exception(type(error), error, own))
    return TrainingError(f"{what}: {type(error).__name__}: {error}", text)


def format_indices(indices: list[int]) -> str:
    """Return the first few indices as a text."""
    shown = ", ".join(map(str, indices[:8]))
    return shown if len(indices) <= 8 else f"{shown} ... ({len(indices)} in all)"


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


def _is_watched(number: int) -> bool:
    return number <= _CHECKED or not number % _EVERY


def _stack(samples: list[Any]) -> Any:
    """Return torch's default_collate; of tuples of tensors without its checks, in two thirds of the time."""
    first = samples[0]
    if type(first) is tuple and all(type(one) is Tensor for one in first) and get_worker_info() is None:
        with suppress(ValueError):  # tuples of several lengths, for which torch has the better message
            return [torch.stack(column) for column in zip(*samples, strict=True)]
    return default_collate(samples)


def _reader_of_rows(dataset: Any) -> Callable[[list[int]], Any] | None:
    """Return a function that reads a batch of a table at once; None for a dataset that is read by samples."""
    if isinstance(dataset, Table):
        return dataset.batch
    return partial(_index_tensors, dataset.tensors) if type(dataset) is TensorDataset else None


def _index_tensors(tensors: tuple[Tensor, ...], indices: list[int]) -> tuple[Tensor, ...]:
    """Return rows of tensors; contiguous ones of 48 kB take a quarter of the time that indexing takes."""
    index = torch.from_numpy(np.array(indices))  # half the time of torch.tensor
    return tuple(one.index_select(0, index) if one.is_contiguous() else one[index] for one in tensors)


def _has_batches(dataset: Any) -> bool:
    """Return True if a dataset reads a batch at once, and not past a ``__getitem__`` of a subclass.

    A Subset has the method even if the dataset in it has not.
    """
    while type(dataset) is Subset:
        dataset = dataset.dataset
    methods = ({"__getitem__", "__getitems__"} & vars(owner).keys() for owner in type(dataset).__mro__)
    return "__getitems__" in next(filter(None, methods), ())


def _shape(sample: Any) -> str:
    shaped = apply_to_collection(sample, (Tensor, np.ndarray), lambda array: f"{tuple(array.shape)}")
    return str(shaped[0] if isinstance(shaped, tuple | list) and shaped else shaped)

"""Numbers of a dataset, one for each sample: its class, its length, or what a user's function returns."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset, Subset, TensorDataset

from pipeline.data.splits import Table
from pipeline.errors import ExperimentError, TrainingError
from pipeline.protocol.progress import ProgressReporter
from pipeline.training.batches.fetch import copy_dataset, usable
from pipeline.training.batches.order import MicroBatch
from pipeline.training.batches.readers import fetcher

Numbers = npt.NDArray[Any]
"""A number for each sample, shape (samples,)."""
Wanted = Literal["targets", "lengths"]
"""Value of a sample, by the name of the attribute in which a dataset may have it for all samples."""

_CHUNK = 256
_COMPARED = 32
"""Samples, and so many of different classes, whose targets are compared with the attribute ``targets``."""
_READ: WeakKeyDictionary[Any, dict[str, Numbers]] = WeakKeyDictionary()
"""Numbers by dataset."""
_NAMES = {"targets": ("labels", "label", "targets", "target"), "lengths": ("input_ids", "inputs", "tokens", "text")}
"""Names of the field in a sample that is a mapping."""
_PLACES = {"targets": 1, "lengths": 0}
"""Place of the field in a sample that is a tuple."""


class Reader:
    """Reader of a value from each sample of a dataset, as in epoch 0: from an attribute, from tables, else one by one.

    Reading a whole dataset takes time, so its progress is reported unless ``silent``.
    """

    def __init__(self, dataset: Dataset[Any], *, key: str, seed: int, silent: bool = False) -> None:
        self._dataset, self._key, self._seed, self._silent = dataset, key, seed, silent

    def classes(self) -> Numbers:
        """Return the class of each sample, int64.

        Raises:
            ExperimentError: the targets are no classes.
            TrainingError: a sample can't be read.
        """
        targets = self._once("targets", self._targets)
        if targets.shape == (len(targets), 1):
            targets = targets[:, 0]
        if targets.ndim != 1:
            raise self._no_classes(f"a target has the shape {targets.shape[1:]}")
        if targets.dtype.kind not in "biuf":
            raise self._no_classes(f"a target is {targets[0]!r}")
        with np.errstate(invalid="ignore"):  # a NaN is refused below
            whole = targets.astype(np.int64)
        if not np.array_equal(whole, targets):
            wrong = targets[whole != targets][0]
            raise self._no_classes(f"a target is {wrong:g}")
        return whole

    def lengths(self) -> Numbers:
        """Return the length of the first field of each sample.

        Raises:
            ExperimentError: a sample has no length.
            TrainingError: a sample can't be read.
        """
        return self._once("lengths", self._lengths)

    def _once(self, wanted: Wanted, read: Callable[[], Numbers]) -> Numbers:
        """Return what ``read`` returns, read once for a dataset: what a training is compared with has the same."""
        try:
            known = _READ.setdefault(self._dataset, {})
        except TypeError:  # unhashable, such as a list
            return read()
        if wanted not in known:
            known[wanted] = read()
        return known[wanted]

    def _lengths(self) -> Numbers:
        if (known := self._find_known(self._dataset, "lengths")) is not None:
            return known
        if type(self._dataset) is TensorDataset and (rows := self._dataset.tensors[0]).ndim > 1:
            return np.full(len(rows), rows.shape[1])
        return np.array([self._length(field, index) for index, field in enumerate(self._each("lengths"))])

    def _targets(self) -> Numbers:
        if (known := self._find_known(self._dataset, "targets")) is not None and not self._differ(known):
            return known
        if isinstance(self._dataset, Table):
            chunks = (self._dataset.batch(list(indices)) for indices in self._chunks())
            return np.concatenate([np.asarray(self._field(columns, "targets")) for columns in chunks])
        values = [np.asarray(value) for value in self._each("targets")]
        if len({value.shape for value in values}) > 1:
            raise self._no_classes("targets have different shapes")
        return np.stack(values)

    def _find_known(self, dataset: Any, field: Wanted) -> Numbers | None:
        """Return the values that a dataset has as a whole; None if its samples have to be read."""
        if type(dataset) is Subset:  # a subclass may return other targets than the dataset in it
            known = self._find_known(dataset.dataset, field)
            return None if known is None else known[np.asarray(dataset.indices)]
        if field == "targets" and type(dataset) is TensorDataset:
            return _as_numbers(self._field(dataset.tensors, field))
        if getattr(dataset, "target_transform", None) is not None:
            return None
        known = _as_numbers(getattr(dataset, field, None))
        return known if known is not None and len(known) == len(dataset) else None

    def _differ(self, targets: Numbers) -> bool:
        """Return True if the targets of an attribute are not the classes of the samples, a few of which are read.

        A sample that cannot be read, or that has no class, contradicts no attribute.
        """
        _, first_of_class = np.unique(targets, return_index=True)
        spread = np.linspace(0, len(targets) - 1, _COMPARED, dtype=int)
        read = self._reading()
        for index in np.union1d(spread, first_of_class[:: -(-len(first_of_class) // _COMPARED)]).tolist():
            try:
                (sample,) = read([index])
                value = _as_class(self._field(sample, "targets"))
            except (ExperimentError, TrainingError):
                continue
            if value is not None and value != targets[index]:
                return True
        return False

    def _each(self, field: Wanted) -> Iterator[Any]:
        read = self._reading()
        for indices in self._chunks():
            for sample in read(list(indices)):
                yield self._field(sample, field)

    def _reading(self) -> Callable[[list[int]], Any]:
        """Return a function that reads samples of a copy: files that it opens must not be open in forked processes."""
        reader = fetcher(copy_dataset(self._dataset), collate=list, seed=self._seed)
        return lambda indices: usable(reader.__getitems__(MicroBatch(0, indices, weight=1.0, is_last=True)))

    def _chunks(self) -> Iterator[range]:
        samples = len(self._dataset)  # type: ignore[arg-type] # map-style, checked before
        what = f"reading all samples for {self._key}"
        with ProgressReporter(what, total=samples, unit="samples", silent=self._silent) as progress:
            for start in range(0, samples, _CHUNK):
                yield range(start, min(start + _CHUNK, samples))
                progress.to(start + _CHUNK)

    def _field(self, sample: Any, field: Wanted) -> Any:
        if isinstance(sample, Mapping):
            if (name := next((name for name in _NAMES[field] if name in sample), None)) is not None:
                return sample[name]
            names = f"{', '.join(map(str, sample))}, but none of {', '.join(_NAMES[field])}"
            raise self._refused(f"a sample has the fields {names}")
        if not isinstance(sample, tuple | list):
            if field == "lengths":
                return sample
            raise self._refused(f"a sample is a {type(sample).__name__}, not (inputs, targets)")
        if len(sample) <= _PLACES[field]:
            raise self._refused(f"a sample has {len(sample)} fields, not (inputs, targets)")
        return sample[_PLACES[field]]

    def _length(self, field: Any, index: int) -> int:
        try:
            return len(field)
        except TypeError:
            raise self._refused(f"sample {index} is a {type(field).__name__} without a length") from None

    def _no_classes(self, seen: str) -> ExperimentError:
        return self._refused(f"{seen}, but balanced needs a class number for each sample")

    def _refused(self, seen: str) -> ExperimentError:
        remedy = "Set _target_ to a function that gets the training set and returns a number for each sample"
        return ExperimentError.of(self._key, f"{seen}. {remedy}.")


def _as_numbers(values: Any) -> Numbers | None:
    """Return values as a number for each sample, shape (samples,); None if they are something else."""
    try:
        numbers = np.asarray(values)
    except (TypeError, ValueError, RuntimeError):
        return None
    numbers = numbers[:, 0] if numbers.ndim > 1 and numbers.shape[1:] == (1,) else numbers
    return numbers if numbers.ndim == 1 and numbers.dtype.kind in "biuf" else None


def _as_class(target: Any) -> float | None:
    """Return a target as a whole number; None if it is something else."""
    try:
        array = np.asarray(target)
    except (TypeError, ValueError, RuntimeError):
        return None
    is_whole = array.size == 1 and array.dtype.kind in "biuf" and float(array.item()).is_integer()
    return float(array.item()) if is_whole else None


def checked(values: Any, *, samples: int, key: str, source: str) -> Numbers:
    """Return a number for each sample as float64.

    Args:
        values: list, array or tensor from a file or a user's function.
        samples: numbers that there must be.
        key: key in the experiment file, for errors.
        source: origin of the values, for errors.

    Raises:
        ExperimentError: they aren't finite numbers, one for each sample.
    """
    try:
        numbers = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError):
        kind = type(values).__name__
        raise ExperimentError.of(key, f"{source} is a {kind}, not a number for each sample") from None
    if numbers.shape != (samples,):
        count = f"{len(numbers):,} numbers" if numbers.ndim == 1 else f"the shape {numbers.shape}"
        raise ExperimentError.of(
            key, f"{source} has {count}, but the training set has {samples:,} samples; use one number for each sample"
        )
    refuse(numbers, ~np.isfinite(numbers), key=key, source=source, wanted="finite numbers")
    return numbers


def refuse(numbers: Numbers, is_wrong: npt.NDArray[np.bool_], *, key: str, source: str, wanted: str) -> None:
    """Raise ExperimentError with the first number that is wrong, if there is one."""
    if is_wrong.any():
        index = int(is_wrong.argmax())
        raise ExperimentError.of(key, f"{source} has {numbers[index]:g} for sample {index}; use {wanted}")

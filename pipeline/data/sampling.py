"""Orders of the training samples for the key ``sampler``: classes in equal shares, and batches of similar lengths."""

import traceback
from collections.abc import Mapping
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Subset

from pipeline.errors import ExperimentError, TrainingError
from pipeline.protocol.progress import ProgressReporter

Indices = npt.NDArray[np.int64]  # Indices of samples, shape (samples,)
Numbers = npt.NDArray[Any]  # A number for each sample, shape (samples,)
_Field = Literal["targets", "lengths"]
_POOL = 50
"""Batches whose samples are sorted together by length: enough that they are alike, few enough to differ each epoch."""
_NAMES = {"targets": ("labels", "label", "targets", "target"), "lengths": ("input_ids", "inputs", "tokens", "text")}
"""Names of the field in a sample that is a mapping; in a tuple it is the second one and the first one."""
_READ: WeakKeyDictionary[Any, dict[str, Numbers]] = WeakKeyDictionary()
"""Numbers by dataset: what a training is compared with has the same."""


def balanced(samples: Any, epoch: int, generator: torch.Generator) -> Indices:  # noqa: ARG001 - as all samplers
    """Return as many indices as there are samples, of each class equally many; an index may repeat, or not occur.

    The class is the attribute ``targets`` of the dataset, or else the second field of each sample, or ``labels`` or
    ``label`` of a mapping. The part of each class is right within one sample.

    Raises:
        ExperimentError: the targets are not classes.
        TrainingError: a sample can't be read.
    """
    targets = _find_numbers(samples, "targets")
    seen = ""
    if targets.ndim != 1:
        seen = f"has the shape {targets.shape[1:]}"
    elif targets.dtype.kind not in "biuf":
        seen = f"is {targets[0]!r}"
    elif (is_wrong := ~np.isfinite(targets) | (targets % 1 != 0)).any():
        seen = f"is {targets[is_wrong][0]:g}"
    if seen:
        raise _make_error(f"a target {seen}, but balanced needs a class number for each sample")
    _, groups, counts = np.unique(targets, return_inverse=True, return_counts=True)
    return draw_weighted((1 / counts)[groups], generator, groups=groups)


def draw_weighted(weights: Any, generator: torch.Generator, *, groups: Any = None) -> Indices:
    """Return as many indices as there are weights, each as often as its part of the sum, rounded up or down at random.

    The draws are evenly spaced over the cumulated weights (systematic sampling, Madow 1949), where the samples of a
    group stand together in random order. So the part of a group is right within one sample in each epoch; independent
    draws would miss it by several percent on a small set. For a sampler of your own.

    Args:
        weights: a number of at least 0 for each sample, shape (samples,).
        generator: the third argument of the sampler.
        groups: a number for each sample, equal in a group; None: samples of the same weight.

    Raises:
        ExperimentError: a weight is negative or not finite, or all are 0.
    """
    weights = np.asarray(weights, dtype=np.float64)
    if (is_wrong := ~(np.isfinite(weights) & (weights >= 0))).any():
        index = int(is_wrong.argmax())
        message = f"the weight of sample {index} is {weights[index]:g}; use finite numbers of at least 0"
        raise ExperimentError.of("sampler", message)
    if not weights.any():
        raise ExperimentError.of("sampler", "no weight is greater than 0, so no sample can be drawn")
    groups, samples = weights if groups is None else np.asarray(groups), len(weights)
    shuffled = torch.randperm(samples, generator=generator).numpy()
    order = shuffled[np.argsort(groups[shuffled], kind="stable")]
    edges = np.cumsum((weights / weights.max())[order])
    start = torch.rand((), generator=generator, dtype=torch.float64).item()
    points = (np.arange(samples) + start) * (edges[-1] / samples)
    points = np.minimum(points, np.nextafter(edges[-1], 0))  # rounding must not lead past the last edge
    drawn = order[np.searchsorted(edges, points, side="right")]
    mixed: Indices = drawn[torch.randperm(samples, generator=generator).numpy()]
    return mixed


def by_length(
    samples: Any,
    epoch: int,  # noqa: ARG001 - as all samplers
    generator: torch.Generator,
    *,
    batch_size: int | None = None,
    lengths: Any = None,
) -> Indices:
    """Return each index once, so that batches have samples of similar length and little padding, in random order.

    The lengths are the attribute ``lengths`` of the dataset. Without it, each sample is read, and the length of its
    first field counts, or of ``input_ids`` in a mapping. An epoch's smaller batch is a random one, not the longest.

    Args:
        samples: the training set.
        epoch: number of the epoch.
        generator: random numbers.
        batch_size: samples of a batch; default: those of the experiment's global batch.
        lengths: a number for each sample, instead of its length.

    Raises:
        ExperimentError: a sample has no length.
        TrainingError: a sample can't be read.
    """
    sizes = _find_numbers(samples, "lengths") if lengths is None else np.asarray(lengths)
    if sizes.shape != (len(samples),):
        message = f"is {sizes.shape} in shape, but the training set has {len(samples):,} samples; use one for each"
        raise ExperimentError.of("sampler.lengths", message)
    shuffled = torch.randperm(len(sizes), generator=generator).numpy()
    batches, rest = list[Indices](), shuffled[:0]
    batch_size = batch_size or len(sizes)
    for start in range(0, len(shuffled), _POOL * batch_size):  # sorted within pools of random samples
        pool = shuffled[start : start + _POOL * batch_size]
        pool = pool[np.argsort(sizes[pool], kind="stable")]
        whole, left = divmod(len(pool), batch_size)
        if left:  # in the last pool
            cut = batch_size * int(torch.randint(whole + 1, (), generator=generator))
            rest, pool = pool[cut : cut + left], np.delete(pool, np.s_[cut : cut + left])
        batches += np.split(pool, whole) if whole else []
    order = torch.randperm(len(batches), generator=generator).tolist()
    return np.concatenate([*(batches[number] for number in order), rest])


def _find_numbers(dataset: Any, field: _Field) -> Numbers:
    """Return a class or a length for each sample, read once for a dataset."""
    try:
        known = _READ.setdefault(dataset, {})
    except TypeError:  # unhashable, such as a list
        known = {}
    if field not in known:
        stated = _read_attribute(dataset, field)
        known[field] = _read_samples(dataset, field) if stated is None else stated
    return known[field]


def _read_attribute(dataset: Any, field: _Field) -> Numbers | None:
    """Return the numbers in an attribute of a dataset; None if its samples have to be read."""
    if type(dataset) is Subset:  # a subclass may return other targets than the dataset in it
        found = _read_attribute(dataset.dataset, field)
        return None if found is None else found[np.asarray(dataset.indices)]
    if getattr(dataset, "target_transform", None) is not None:
        return None
    try:
        numbers = _flatten(np.asarray(getattr(dataset, field, None)))
    except (TypeError, ValueError, RuntimeError):
        return None
    return numbers if numbers.shape == (len(dataset),) and numbers.dtype.kind in "biuf" else None


def _read_samples(dataset: Any, field: _Field) -> Numbers:
    values, samples = list[Any](), len(dataset)
    with ProgressReporter("reading all samples for the sampler", total=samples, unit="samples") as progress:
        for index in range(samples):
            try:
                sample = dataset[index]
            except Exception as error:
                message = f"sample {index} of the data can't be read: {type(error).__name__}: {error}"
                raise TrainingError(message, traceback.format_exc()) from error
            value = _find_field(sample, field)
            if field == "lengths" and not hasattr(value, "__len__"):
                raise _make_error(f"sample {index} is a {type(value).__name__} without a length")
            values.append(np.asarray(value) if field == "targets" else len(value))
            progress.by(1)
    if len({np.shape(value) for value in values}) > 1:
        raise _make_error("targets have different shapes, but balanced needs a class number for each sample")
    return _flatten(np.stack(values))


def _find_field(sample: Any, field: _Field) -> Any:
    if isinstance(sample, Mapping):
        if (name := next((name for name in _NAMES[field] if name in sample), None)) is None:
            has = f"a sample has the fields {', '.join(map(str, sample))}"
            raise _make_error(f"{has}, but none of {', '.join(_NAMES[field])}")
        return sample[name]
    if field == "lengths":
        return sample[0] if isinstance(sample, tuple | list) and sample else sample
    if not isinstance(sample, tuple | list) or len(sample) < 2:
        raise _make_error(f"a sample is a {type(sample).__name__}, not (inputs, targets)")
    return sample[1]


def _flatten(numbers: Numbers) -> Numbers:
    return numbers[:, 0] if numbers.ndim == 2 and numbers.shape[1] == 1 else numbers


def _make_error(seen: str) -> ExperimentError:
    remedy = "Set _target_ to a function (training set, epoch, generator) that returns the indices of an epoch"
    return ExperimentError.of("sampler", f"{seen}. {remedy}.")

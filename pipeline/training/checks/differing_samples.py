"""Samples of a training set that differ most in what a loss may be divided by.

These are their sizes, the numbers of ignored targets and of zeros in masks, and their classes. A loss that is a mean
over something else than samples differs from the mean over samples on such samples only.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pipeline.errors import ExperimentError, TrainingError
from pipeline.protocol.rank import Rank
from pipeline.tasks.from_model import IGNORED
from pipeline.training.batches.rows import count_rows
from pipeline.training.ranks.collectives import from_first

MOST_READ, READING_S = 256, 2.0
"""Samples that are looked at, at most, and the seconds after which no further one is read."""
_GROUPS, _CLASSES = 8, 32
_IGNORED_PIXEL = 255
"""Label of pixels that don't count in many sets for segmentation."""
_SIZE, _IGNORED, _MASKED, _VALUE, _ZEROS, _MEAN = range(6)
"""Properties of a tensor in a sample, the most important first."""

Properties = dict[tuple[int, int], float]
"""Values by property and number of the tensor in the sample."""


class Readable(Protocol):
    """A set of samples, such as the training set of `pipeline.training.batches.rank_batches.Batches`."""

    @property
    def rank(self) -> Rank:
        """The rank that reads."""

    @property
    def readable(self) -> int:
        """Samples that can be read by index: the first ones."""

    @property
    def read(self) -> Callable[[list[int]], Any]:
        """Function that returns samples as one batch, on the CPU."""


def choose(batches: Readable, *, count: int, most: int = MOST_READ, seconds: float = READING_S) -> list[list[int]]:
    """Return groups of ``count`` samples, the most important group first, then ordinary samples. Collective.

    The first ``count // 2`` samples of other groups differ from the rest of the group.
    """
    known = from_first(lambda: dict(_read(batches, most=most, seconds=seconds)), rank=batches.rank)
    if not known:
        return [list(range(count))]
    pairs = list(dict.fromkeys(chain(_extremes(known), _classes(known))))
    groups = [_group(pairs[first:], known, count=count) for first in range(0, len(pairs), count // 2)]
    return [*groups[:1], _group([], known, count=count), *groups[1:_GROUPS]]


def _read(batches: Readable, *, most: int, seconds: float) -> Iterator[tuple[int, Properties]]:
    """Yield samples from all over the training set; an unreadable one is left to the training."""
    started, readable = time.monotonic(), batches.readable
    number = min(readable, most)
    # In bits reversed, the first ones are spread over the set, too.
    for place in sorted(range(number), key=lambda place: f"{place:010b}"[::-1]):
        if time.monotonic() - started > seconds:
            return
        index = place * (readable - 1) // max(number - 1, 1)
        try:
            sample = batches.read([index])
        except (ExperimentError, TrainingError):
            continue
        if count_rows(sample) != 0:
            yield index, dict(_properties(sample))


def _properties(sample: Any) -> Iterator[tuple[tuple[int, int], float]]:
    for number, leaf in enumerate(tree_leaves(sample)):
        if isinstance(leaf, str | bytes):
            yield (_SIZE, number), len(leaf)
        elif isinstance(leaf, int | float):
            yield (_VALUE, number), leaf
        elif isinstance(leaf, Tensor) and leaf.numel() and not leaf.is_complex() and leaf.layout is torch.strided:
            yield from (((what, number), value) for what, value in _of_tensor(leaf))
        elif isinstance(leaf, Tensor):
            yield (_SIZE, number), leaf.numel()


def _of_tensor(leaf: Tensor) -> Iterator[tuple[int, float]]:
    yield _SIZE, leaf.numel()
    if leaf.numel() == 1:
        yield _VALUE, float(leaf)
        return
    yield (_ZEROS if leaf.is_floating_point() else _MASKED), float((leaf == 0).sum())
    if leaf.is_floating_point():
        yield _IGNORED, float((~leaf.isfinite()).sum())
        leaf = leaf.nan_to_num()
    elif leaf.dtype is torch.int64:
        yield _IGNORED, float(((leaf == IGNORED) | (leaf == _IGNORED_PIXEL)).sum())
    yield _MEAN, float(leaf.float().mean())


def _extremes(known: dict[int, Properties]) -> Iterator[tuple[int, int]]:
    """Yield for each property the samples with the highest and the lowest value, if they differ."""
    for what in sorted({what for properties in known.values() for what in properties}):
        values = {index: properties.get(what, 0.0) for index, properties in known.items()}
        most, least = max(values, key=values.__getitem__), min(values, key=values.__getitem__)
        if values[most] != values[least]:
            yield most, least


def _classes(known: dict[int, Properties]) -> Iterator[tuple[int, int]]:
    """Yield pairs of samples with different values of a single number, such as the class."""
    for what in sorted({what for properties in known.values() for what in properties if what[0] == _VALUE}):
        first = {properties[what]: index for index, properties in known.items() if what in properties}
        found = [first[value] for value in sorted(first)][:_CLASSES]
        yield from zip(found[::2], found[1::2], strict=False)
        if len(found) > 1 and len(found) % 2:
            yield found[-1], found[0]


def _group(pairs: Sequence[tuple[int, int]], known: dict[int, Properties], *, count: int) -> list[int]:
    """Return the first samples of the pairs, then their second ones, filled up with others."""
    cut, others = count // 2, list(known)
    first = [one for one, _ in pairs[:cut]]
    second = [other for _, other in pairs[:cut]] + [one for one, _ in pairs[cut : count - cut]]
    filled = ([index for index in others if index not in (*first, *second)] or others) * count
    return [*first, *filled][:cut] + [*second, *filled[cut:]][: count - cut]

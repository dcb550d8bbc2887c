"""Orders of an experiment's section ``order``: by weight, by length, or by a function of the user.

Like the shuffle that they stand in place of, they are functions of seed and epoch, see `pipeline.training.order`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from typing_extensions import override

from pipeline.config import components
from pipeline.config.sampler import SamplerOptions
from pipeline.config.schema import Experiment
from pipeline.config.values import Component
from pipeline.errors import ExperimentError
from pipeline.training import per_sample
from pipeline.training.dataset_epoch import set_epoch
from pipeline.training.order import Indices, SampleOrder
from pipeline.training.per_sample import Numbers, Reader
from pipeline.training.randomness import generators_kept, mix, seed_all

EpochDraw = Callable[[int, torch.Generator], Indices]
"""Function that returns the indices of an epoch, counted from 0, with random numbers from a generator."""

_POOL = 50
"""Global batches whose samples are sorted together by length: enough that they are alike, few enough to differ from
epoch to epoch."""


@dataclass(frozen=True, kw_only=True)
class OwnOrder(SampleOrder):
    """Order in which ``samples`` indices of a set of ``in_set`` samples form an epoch; an index may repeat."""

    in_set: int
    draw: EpochDraw

    @property
    @override
    def set_size(self) -> int:
        return self.in_set

    @override
    def permutation(self, epoch: int) -> torch.Tensor:
        return torch.from_numpy(self.draw(epoch, self.generator(epoch)))


def order_of(
    experiment: Experiment, dataset: Dataset[Any], *, samples: int, allowed: tuple[str, ...], silent: bool = False
) -> SampleOrder:
    """Return the order of an experiment's training samples.

    Args:
        experiment: names the order, seed and global batch size.
        dataset: training set, which some orders read once.
        samples: size of the training set.
        allowed: packages that a ``_target_`` may name.
        silent: True if another rank reports the progress of reading.

    Raises:
        ExperimentError: the order doesn't fit the samples.
        TrainingError: a sample can't be read.
    """
    plain = SampleOrder(samples=samples, global_batch_size=experiment.train.global_batch_size, seed=experiment.seed)
    if experiment.sampler is None:
        return plain
    declared = _Declared(experiment.sampler, dataset, plain, allowed=allowed, silent=silent)
    draw = declared.draw()
    count = samples if declared.order.target is None else len(draw(0, plain.generator(0)))
    return OwnOrder(
        samples=count, global_batch_size=plain.global_batch_size, seed=plain.seed, in_set=samples, draw=draw
    )


class _Declared:
    """Section ``order`` with the training set that it orders."""

    def __init__(
        self,
        order: SamplerOptions,
        dataset: Dataset[Any],
        plain: SampleOrder,
        *,
        allowed: tuple[str, ...],
        silent: bool,
    ) -> None:
        self.order = order
        self._dataset, self._plain, self._allowed, self._silent = dataset, plain, allowed, silent

    def draw(self) -> EpochDraw:
        """Return the function that draws an epoch."""
        if self.order.bucket_by is not None:
            return _by_length(self._lengths(self.order.bucket_by), batch_size=self._plain.global_batch_size)
        if self.order.weights is not None:
            return _by_weight(*self._weights(self.order.weights))
        return self._by_function()

    def _weights(self, given: Any) -> tuple[Numbers, Numbers]:
        """Return the weight and the group of each sample: its class, or all samples of the same weight."""
        key = "sampler.weights"
        if given == "balanced":
            source = "the attribute targets"
            classes = per_sample.checked(
                self._reader(key).classes(), samples=self._plain.samples, key=key, source=source
            )
            _, groups, counts = np.unique(classes, return_inverse=True, return_counts=True)
            return (1 / counts)[groups], groups
        values, source = self._called(given, key=key) if isinstance(given, Component) else (given, "the list")
        weights = per_sample.checked(values, samples=self._plain.samples, key=key, source=source)
        per_sample.refuse(weights, weights < 0, key=key, source=source, wanted="numbers of at least 0")
        if not weights.any():
            raise ExperimentError.of(key, f"{source} has no number greater than 0, so no sample can be drawn")
        return weights / weights.max(), weights

    def _lengths(self, given: Any) -> Numbers:
        key = "sampler.bucket_by"
        if given == "length":
            values, source = self._reader(key).lengths(), "the attribute lengths"
        else:
            values, source = self._called(given, key=key)
        return per_sample.checked(values, samples=self._plain.samples, key=key, source=source)

    def _called(self, component: Component, *, key: str) -> tuple[Any, str]:
        values = self._seeded(components.bound(component, key=key, allowed=self._allowed), 0)(self._dataset)
        return values, f"the result of {component.target}"

    def _reader(self, key: str) -> Reader:
        return Reader(self._dataset, key=key, seed=self._plain.seed, silent=self._silent)

    def _by_function(self) -> EpochDraw:
        component = self.order.function
        assert component is not None
        call = components.bound(component, key="sampler", allowed=self._allowed)

        def called(epoch: int) -> Indices:
            set_epoch(self._dataset, epoch, seed=self._plain.seed)
            drawn = self._seeded(call, epoch)(self._dataset, epoch, self._plain.generator(epoch))
            return _indices(drawn, epoch=epoch, samples=self._plain.samples, target=component.target)

        return _OfFunction(called, target=component.target)

    def _seeded(self, call: Callable[..., Any], epoch: int) -> Callable[..., Any]:
        """Return the function with global generators seeded by epoch, and left as they were."""

        def seeded(*args: object) -> Any:
            with generators_kept():
                seed_all(mix(self._plain.seed, "order", epoch), device=torch.device("cpu"))
                return call(*args)

        return seeded


class _OfFunction:
    """Indices that a user's function returns for an epoch, equally many for each, the last two epochs kept."""

    def __init__(self, call: Callable[[int], Indices], *, target: str) -> None:
        """Call the function twice for the first epoch.

        Raises:
            ExperimentError: it returned different indices.
        """
        # Measurements begin an epoch several times, and a user's function may be slow.
        self._call, self._target = lru_cache(maxsize=2)(call), target
        self._count = len(self._call(0))
        if not np.array_equal(call(0), self._call(0)):
            raise ExperimentError.of(
                "sampler",
                f"{target} returned different indices when called again for the same epoch, so a resumed run would "
                "differ. Draw only from the generator that it receives.",
            )

    def __call__(self, epoch: int, _: torch.Generator) -> Indices:
        drawn = self._call(epoch)
        if len(drawn) != self._count:
            raise ExperimentError.of(
                "sampler",
                f"{self._target} returned {len(drawn):,} indices for epoch {epoch}, but {self._count:,} for epoch 0; "
                "return the same number for each epoch",
            )
        return drawn


def _by_weight(weights: Numbers, groups: Numbers) -> EpochDraw:
    """Draw as many samples as there are, each as often as its share of the weights, rounded up or down at random.

    The draws are evenly spaced over the cumulated weights (systematic sampling, Madow 1949), where the samples of a
    group stand together in random order. So the share of a group is right within one sample in each epoch;
    independent draws would miss it by several percent on a small set.
    """
    samples = len(weights)

    def draw(_: int, generator: torch.Generator) -> Indices:
        shuffled = torch.randperm(samples, generator=generator).numpy()
        order = shuffled[np.argsort(groups[shuffled], kind="stable")]
        edges = np.cumsum(weights[order])
        start = torch.rand((), generator=generator, dtype=torch.float64).item()
        points = (np.arange(samples) + start) * (edges[-1] / samples)
        points = np.minimum(points, np.nextafter(edges[-1], 0))  # rounding must not lead past the last edge
        drawn = order[np.searchsorted(edges, points, side="right")]
        mixed: Indices = drawn[torch.randperm(samples, generator=generator).numpy()]
        return mixed

    return draw


def _by_length(lengths: Numbers, *, batch_size: int) -> EpochDraw:
    """Cut samples, sorted by length within pools of random ones, into global batches, and shuffle these.

    The smaller batch at the end of the epoch is a random one, too, not that of the longest samples.
    """

    def draw(_: int, generator: torch.Generator) -> Indices:
        shuffled = torch.randperm(len(lengths), generator=generator).numpy()
        batches, rest = list[Indices](), shuffled[:0]
        for start in range(0, len(shuffled), _POOL * batch_size):
            pool = shuffled[start : start + _POOL * batch_size]
            pool = pool[np.argsort(lengths[pool], kind="stable")]
            whole, left = divmod(len(pool), batch_size)
            if left:  # in the last pool
                cut = batch_size * int(torch.randint(whole + 1, (), generator=generator))
                rest, pool = pool[cut : cut + left], np.delete(pool, np.s_[cut : cut + left])
            batches += np.split(pool, whole) if whole else []
        order = torch.randperm(len(batches), generator=generator).tolist()
        return np.concatenate([*(batches[number] for number in order), rest])

    return draw


def _indices(drawn: Any, *, epoch: int, samples: int, target: str) -> Indices:
    """Return what a user's function returned as indices.

    Raises:
        ExperimentError: it isn't a sequence of indices of samples.
    """
    where = f"{target} returned"
    try:
        indices = np.asarray(drawn)
    except (TypeError, ValueError, RuntimeError):
        indices = np.empty((), dtype=object)
    if indices.ndim != 1 or (indices.dtype.kind not in "iu" and indices.size):
        kind = type(drawn).__name__ + (f" of {indices.dtype} numbers" if indices.ndim == 1 else "")
        raise ExperimentError.of("sampler", f"{where} a {kind} for epoch {epoch}; it must return integer indices")
    if not indices.size:
        raise ExperimentError.of("sampler", f"{where} no indices for epoch {epoch}; return at least one")
    is_outside = (indices < 0) | (indices >= samples)
    if is_outside.any():
        place = int(is_outside.argmax())
        raise ExperimentError.of(
            "sampler",
            f"{where} index {indices[place]} at position {place} for epoch {epoch}, but samples are numbered from 0 to "
            f"{samples - 1}",
        )
    return indices.astype(np.int64)

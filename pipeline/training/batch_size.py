"""Search for the batch size of a device: the largest that fits, and the smallest with close to the best throughput.

Sizes double until one doesn't fit, on CPU until throughput stops growing; the gap below a size that doesn't fit is
bisected. The sizes that fit are then measured alternately. `pipeline.training.bench` tries and measures a size.
"""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Protocol

from torch.nn.modules.batchnorm import _BatchNorm

from pipeline.errors import ExperimentError
from pipeline.protocol.estimates import spread
from pipeline.protocol.progress import ProgressReporter
from pipeline.protocol.trial import Rank, Tuning
from pipeline.protocol.trial_result import BatchCandidate, BatchSizes
from pipeline.training.bench import TrialBench
from pipeline.training.build import build

CLOSE = 0.95
"""Fraction of the best throughput from which a throughput counts as close to it."""
_PAYS = 1.05  # factor by which the throughput of a doubled size must grow
_FIRST_WINDOWS = 3  # enough to know when to stop
_ROUNDS = 5


class Bench(Protocol):
    """Interface for trying batch sizes. Its methods are collective and return the same on all ranks."""

    def fits(self, batch_size: int) -> bool:
        """Return True if all ranks have the memory for steps on micro-batches of this size."""
        ...

    def rate(self, batch_size: int) -> float:
        """Measure samples per second over all workers, in a window, at a size that fits."""
        ...

    def peak_memory_mb(self) -> tuple[float, ...]:
        """Return the peak memory of all devices in MiB, in rank order, since the last size was found to fit."""
        ...


def find(trial: Tuning, *, rank: Rank) -> BatchSizes:
    """Search the batch sizes of a trial. Collective; returns the same on all ranks.

    Raises:
        ExperimentError: the experiment can't be trained, or has fewer samples than devices.
    """
    setup = build(trial, rank=rank)
    samples = setup.order.samples
    if not (share := samples // trial.replicas):
        raise ExperimentError.of(
            "data", f"the training set has {samples} samples for {trial.replicas} devices; use fewer parallel.workers"
        )
    most = min(share, trial.max_batch_size or share)
    # Batch norm needs at least two values.
    smallest = min(most, 2 if any(isinstance(module, _BatchNorm) for module in setup.model.modules()) else 1)
    search = Search(TrialBench(setup), smallest=smallest, most=most, until_flat=setup.device.type == "cpu")
    return outcome(search.run(also=trial.device_batch_size), train_samples=samples)


def outcome(candidates: Sequence[BatchCandidate], *, train_samples: int) -> BatchSizes:
    """Summarize the candidates, given in ascending order."""
    fitting = {one.batch_size: one.samples_per_second.median for one in candidates if one.samples_per_second}
    best = max(fitting.values(), default=0.0)
    return BatchSizes(
        candidates=tuple(candidates),
        largest_that_fits=max(fitting, default=0) if len(fitting) < len(candidates) else None,
        recommended=next((size for size, rate in fitting.items() if rate >= CLOSE * best), None),
        train_samples=train_samples,
    )


class Search:
    """The search for batch sizes; the same on every rank, since it depends on nothing but the bench."""

    def __init__(self, bench: Bench, *, smallest: int, most: int, until_flat: bool) -> None:
        """Limit the search to ``most``; ``until_flat`` ends it where two doublings in a row gain little."""
        self._bench = bench
        self._smallest, self._most, self._until_flat = smallest, most, until_flat
        self._refused: list[int] = []
        self._rates: dict[int, float] = {}
        self._peaks: dict[int, tuple[float, ...]] = {}

    def run(self, *, also: int) -> list[BatchCandidate]:
        """Try sizes, including ``also`` if a larger one fits, and return all candidates in ascending order."""
        with ProgressReporter("trying batch sizes", unit="samples") as self._progress:
            self._try_out(also=also)
        refused = [BatchCandidate(batch_size=size, fits=False) for size in self._refused]
        return sorted([*self._measured(), *refused], key=lambda one: one.batch_size)

    def _try_out(self, *, also: int) -> None:
        size = self._smallest
        while self._fits(size) and size < self._most and not self._is_flat():
            size = min(2 * size, self._most)
        if self._refused:
            self._bisect()
        if self._smallest <= also < max(self._rates, default=0):
            self._fits(also)

    def _fits(self, size: int) -> bool:
        if size in self._rates:
            return True
        self._progress.to(size)
        if not self._bench.fits(size):
            self._refused.append(size)
            return False
        self._rates[size] = median([self._bench.rate(size) for _ in range(_FIRST_WINDOWS)])
        self._peaks[size] = self._bench.peak_memory_mb()
        return True

    def _is_flat(self) -> bool:
        rates = list(self._rates.values())[-3:]
        return self._until_flat and len(rates) == 3 and all(after < _PAYS * before for before, after in pairwise(rates))

    def _bisect(self) -> None:
        """Bisect to the largest size that fits, in steps of an eighth of the largest doubled size that fits."""
        low, high = max(self._rates, default=self._smallest - 1), self._refused[0]
        grain = max(1, low // 8)
        while high - low > grain:
            middle = low + max(1, (high - low) // 2 // grain) * grain
            low, high = (middle, high) if self._fits(middle) else (low, middle)

    def _measured(self) -> list[BatchCandidate]:
        """Measure all sizes that fit, alternately, so that drift of the machine affects all equally."""
        rates: dict[int, list[float]] = {size: [] for size in sorted(self._rates)}
        with ProgressReporter("measuring batch sizes", total=_ROUNDS * len(rates), unit="windows") as progress:
            for _ in range(_ROUNDS):
                for size, windows in rates.items():
                    windows.append(self._bench.rate(size))
                    progress.by(1)
        return [
            BatchCandidate(
                batch_size=size,
                fits=True,
                samples_per_second=spread(windows, keeps_values=True),
                peak_memory_mb=self._peaks[size],
            )
            for size, windows in rates.items()
        ]

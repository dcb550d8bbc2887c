"""Digest of the data: a fixed spread of samples, by which a resumed training notices that its data has changed.

`pipeline.training.batches.sampled_data` reads them. This module doesn't import torch: commands read manifests of
checkpoints.
"""

import math
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import NamedTuple

from pipeline.config.values import Frozen

_CLOSE = 1e-3
"""Largest difference of a rounding: relative, and absolute where an array has values over 1."""


class SampleDigest(Frozen):
    """Digest of one sample, as a batch of one."""

    exact: str
    """Hash of all that can be compared."""
    layout: str
    """The same without the values of floating-point arrays, but with their shapes."""
    values: str
    """Some values of each floating-point array, their mean and their mean size; ";" is between arrays."""

    def is_rounded(self, other: "SampleDigest") -> bool:
        """Return True if another sample differs by a rounding of its floating-point values."""
        if self.layout != other.layout:
            return False
        arrays = zip(self.values.split(";"), other.values.split(";"), strict=True)
        return all(_are_close(*([*map(float, each.split())] for each in pair)) for pair in arrays)


class DataDigest(Frozen):
    """Digest of a training's data."""

    sizes: Mapping[str, int]
    """Samples of each set: training, validation, test; of a set without a length 0."""
    samples: Mapping[str, SampleDigest]
    """Digests by name, e.g. "sample 17 of the training set"."""
    unstable: int = 0
    """Samples that differed between two readings."""
    unread: int = 0
    """Samples that could not be read, or not in time."""

    def text(self, declaration: str) -> str:
        """Return a short hash of the data and its declaration."""
        parts = (declaration, *self.sizes.items(), *((name, one.exact) for name, one in sorted(self.samples.items())))
        return sha256(repr(parts).encode()).hexdigest()[:12]

    @property
    def notes(self) -> tuple[str, ...]:
        """Note on samples that can't be compared."""
        reasons = {"differ each time they are read": self.unstable, "could not be read in time": self.unread}
        left_out = " and ".join(f"{number} {reason}" for reason, number in reasons.items() if number)
        if not left_out:
            return ()
        return (f"a resumed run checks {len(self.samples)} samples for changes. {left_out}",)


class DataChange(NamedTuple):
    """Difference between the data of a checkpoint and that of now."""

    message: str
    is_rounding: bool


def find_change(before: DataDigest, now: DataDigest, *, since: str) -> DataChange | None:
    """Return how the data has changed since a checkpoint, ``since`` names it; None if no difference is found."""
    for name in dict.fromkeys((*before.sizes, *now.sizes)):
        then, there = before.sizes.get(name, 0), now.sizes.get(name, 0)
        if then != there:
            return DataChange(f"the {name} set has {there} samples, but had {then} when {since} was saved", False)
    common = [name for name in before.samples if name in now.samples]
    other = [name for name in common if now.samples[name].exact != before.samples[name].exact]
    changed = [name for name in other if not now.samples[name].is_rounded(before.samples[name])]
    if changed:
        many = f", as have {len(changed)} of the {len(common)} compared samples" if len(changed) > 1 else ""
        first = min(changed, key=lambda name: (len(name), name))
        return DataChange(f"{first} has changed since {since} was saved{many}", False)
    if other:
        message = (
            f"{len(other)} of {len(common)} compared samples differ by at most {_CLOSE:.1%} since {since} was saved"
        )
        return DataChange(message, True)
    return None


def _are_close(now: Sequence[float], then: Sequence[float]) -> bool:
    scale = min(1.0, max((abs(value) for value in then if math.isfinite(value)), default=0.0))
    return len(now) == len(then) and all(
        math.isclose(one, other, rel_tol=_CLOSE, abs_tol=_CLOSE * scale) or (math.isnan(one) and math.isnan(other))
        for one, other in zip(now, then, strict=True)
    )

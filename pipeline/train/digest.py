"""Digest of the data: hashes of a few samples, by which a resumed training notices that its data has changed.

Commands read it from manifests of checkpoints: this module doesn't import torch.
"""

from collections.abc import Mapping
from hashlib import sha256

from pipeline.experiment.values import Frozen


class DataDigest(Frozen):
    """Digest of a training's data."""

    sizes: Mapping[str, int]
    """Samples of each set: training, validation, test; of a set without a length 0."""
    samples: Mapping[str, str]
    """Hashes by name, e.g. of "sample 17 of the training set"."""
    unstable: int = 0
    """Samples that differed between two readings."""
    unread: int = 0
    """Samples that could not be read, or not in time."""

    def text(self, declaration: str) -> str:
        """Return a short hash of the data and its declaration."""
        parts = (declaration, *self.sizes.items(), *sorted(self.samples.items()))
        return sha256(repr(parts).encode()).hexdigest()[:12]

    @property
    def notes(self) -> tuple[str, ...]:
        """Note on samples that can't be compared."""
        reasons = {"differ each time they are read": self.unstable, "could not be read in time": self.unread}
        left_out = " and ".join(f"{number} {reason}" for reason, number in reasons.items() if number)
        if not left_out:
            return ()
        return (f"a resumed run checks {len(self.samples)} samples for changes. {left_out}",)


def find_change(before: DataDigest, now: DataDigest, *, since: str) -> str | None:
    """Return how the data has changed since a checkpoint, ``since`` names it; None if no difference is found."""
    for name in dict.fromkeys((*before.sizes, *now.sizes)):
        then, there = before.sizes.get(name, 0), now.sizes.get(name, 0)
        if then != there:
            return f"the {name} set has {there} samples, but had {then} when {since} was saved"
    common = [name for name in before.samples if name in now.samples]
    changed = [name for name in common if now.samples[name] != before.samples[name]]
    if not changed:
        return None
    many = f", as have {len(changed)} of the {len(common)} compared samples" if len(changed) > 1 else ""
    first = min(changed, key=lambda name: (len(name), name))
    return f"{first} has changed since {since} was saved{many}"

"""Reading of an iterable dataset's samples in sequence, with random numbers by their place."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from pipeline.errors import TrainingError
from pipeline.training.batches.fetch import failed
from pipeline.training.ranks.randomness import mix, seed_all

_CPU = torch.device("cpu")


class SampleReader:
    """Reading of a dataset's samples, in sequence; of one without a length several, one after another."""

    def __init__(
        self,
        dataset: Any,
        *,
        what: str,
        seed: int,
        epoch: int = 0,
        index: int = 0,
        passes: int = 0,
        again: bool = False,
        keeps: int = 0,
        restored: Any = None,
    ) -> None:
        """Begin at a sample of an epoch.

        Args:
            dataset: an iterable dataset.
            what: its name in messages.
            seed: seed of the random numbers that it draws.
            epoch: number of the epoch.
            index: number of the first sample in it.
            passes: passes over the dataset in this epoch before.
            again: True to start over after the last sample.
            keeps: latest samples to keep.
            restored: copy of the dataset with a state, in its place for the first pass: some begin each pass with it.
        """
        self.epoch, self.index, self.passes = epoch, index, passes
        self.dataset = dataset if restored is None else restored
        """Dataset of this pass."""
        self.is_fresh = True
        """True until a batch is served of it."""
        self.ahead = deque[Any]()
        """Samples that were looked at, but not read yet."""
        self.latest = deque[Any](maxlen=keeps)
        self._what, self._seed, self._again, self._original = what, seed, again, dataset
        self._iterator: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples of one pass; raises as `read`."""
        while (found := self._next()) is not None:
            self.index += 1
            yield found[0]

    def read(self) -> Any:
        """Return the next sample.

        Raises:
            TrainingError: the dataset raised, or has no more samples.
        """
        if not self.ahead:
            self.peek()
        sample = self.ahead.popleft()
        self.index += 1
        self.latest.append(sample)
        return sample

    def peek(self) -> Any:
        """Return the next sample that wasn't looked at before, which remains to be read; raises as `read`."""
        found = self._next()
        if found is None and self._again and self.index + len(self.ahead):
            self._iterator, self.passes, self.dataset = None, self.passes + 1, self._original
            found = self._next()
        if found is None:
            raise TrainingError(
                f"the {self._what} set has no sample {self.index + len(self.ahead)}, counted from 0, in epoch "
                f"{self.epoch + 1}. Each iteration must return as many samples as its length, at least one."
            )
        self.ahead.append(found[0])
        return found[0]

    def is_over(self) -> bool:
        """Return True if there is no further sample, which would be lost."""
        return not self.ahead and self._next() is None

    def skip_to(self, index: int) -> None:
        """Read up to a sample; raises as `read`."""
        while self.index < index:
            self.read()

    def _next(self) -> tuple[Any] | None:
        """Return a sample in a tuple; None after the last. Its random numbers are those of its place, on all ranks."""
        seed_all(mix(self._seed, "sample", self.epoch, self.index + len(self.ahead)), device=_CPU)
        try:
            if self._iterator is None:
                set_epoch(self.dataset, self.epoch + self.passes)
                self._iterator = iter(self.dataset)
            return (next(self._iterator),)
        except StopIteration:
            return None
        except Exception as error:
            place = self.index + len(self.ahead)
            raise failed(f"sample {place} of the {self._what} set can't be read", error) from error


def set_epoch(dataset: Any, number: int) -> None:
    """Tell a dataset the number of its next pass, counted from 0, if it asks for it."""
    if (method := getattr(dataset, "set_epoch", None)) is not None:
        method(number)

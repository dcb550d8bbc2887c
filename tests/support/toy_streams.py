"""Iterable datasets for tests, named by ``_target_: toy_streams.NAME``: with and without length, state, seeds."""

import importlib
import os
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset
from toys import regression

SAMPLES = 22


class Plain(IterableDataset[Any]):
    """The samples of `toys.regression` in their order; without a length."""

    def __init__(self, samples: int = SAMPLES, *, validation: bool = False) -> None:
        training, held_out = regression(samples=samples)
        self.samples = list(held_out if validation else training)  # type: ignore[call-overload]

    def __iter__(self) -> Iterator[Any]:
        yield from self.samples


class Sized(Plain):
    def __len__(self) -> int:
        return len(self.samples)


class Longer(Sized):
    """Says that it has fewer samples than it yields, or more."""

    def __init__(self, by: int) -> None:
        super().__init__()
        self.by = by

    def __iter__(self) -> Iterator[Any]:
        yield from (*self.samples, *self.samples)[: len(self.samples) + self.by]


class Failing(Sized):
    def __iter__(self) -> Iterator[Any]:
        yield from self.samples[:10]
        raise OSError("the connection broke")


class Shuffled(Sized):
    """Another order in each epoch, by a seed, and noise of Python's generator, as an augmentation draws it."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = list(range(len(self.samples)))
        random.Random(self.epoch).shuffle(order)
        for index in order:
            inputs, targets = self.samples[index]
            yield inputs + 0.1 * random.random(), targets


class Stateful(Plain):
    """A stream without a length that tells where it is. As some of Hugging Face's, it begins passes with its state."""

    read = 0

    def __init__(self) -> None:
        super().__init__()
        self._at, self._start, self._epoch = 0, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at, "epoch": self._epoch, "nested": [{"none": None}, torch.tensor([self._at])]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert int(state["nested"][1]) == state["at"]
        self._start, self._epoch = state["at"], state["epoch"]

    def __iter__(self) -> Iterator[Any]:
        for at, (inputs, targets) in enumerate(self.samples[self._start :], start=self._start + 1):
            type(self).read += 1
            self._at = at
            yield inputs + self._epoch, targets


class Buffered(Stateful):
    """Its state doesn't hold the samples in its shuffle buffer."""

    def __iter__(self) -> Iterator[Any]:
        buffer = []
        for sample in super().__iter__():
            buffer.append(sample)
            if len(buffer) == 5:
                yield buffer.pop(random.Random(self._at).randrange(5))
        yield from buffer


class Unseeded(Sized):
    """Another order in each process and each time."""

    def __iter__(self) -> Iterator[Any]:
        return iter(random.Random(os.urandom(8)).sample(self.samples, len(self.samples)))


class Code(Stateful):
    """A state that can't be stored without pickle."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "code": print}


class Demanding(Stateful):
    """A state that only a loader of its library can ask for, as LitData's."""

    def state_dict(self, samples: int) -> dict[str, Any]:  # type: ignore[override]
        return {**super().state_dict(), "at": samples}


def stream(kind: str, validation: bool = False, **arguments: Any) -> tuple[Any, Any]:
    """A stream of a class of this file, and one to validate on if wanted."""
    return globals()[kind](**arguments), Plain(validation=True) if validation else None


def with_sized_validation(length: int = 10) -> tuple[Any, Any]:
    return regression()[0], Sized(validation=True)


def in_order(samples: Any, epoch: int, generator: torch.Generator) -> range:
    """An order without a shuffle, for samples that can be read by index."""
    return range(len(samples))


def collated() -> Any:
    def collate(samples: list[Any]) -> Any:
        return torch.tensor([one["x"] for one in samples]), torch.tensor([[one["y"]] for one in samples])

    return collate


def of_module(module: str, name: str) -> tuple[Any, Any]:
    """The datasets of a function of a module, which trials need not allow."""
    datasets: tuple[Any, Any] = getattr(importlib.import_module(module), name)()
    return datasets


def transformed() -> tuple[Any, Any]:
    """Return datasets of Hugging Face's datasets whose transform gets a batch and draws noise for each sample."""
    import datasets

    def add_noise(batch: dict[str, Any]) -> dict[str, Any]:
        inputs = torch.tensor(batch["x"])
        return batch | {"x": (inputs + torch.randn(inputs.shape)).tolist()}

    inputs, targets = regression()[0].tensors  # type: ignore[attr-defined]
    columns = {"x": inputs.tolist(), "y": targets.flatten().tolist()}
    found = datasets.Dataset.from_dict(columns).with_transform(add_noise)
    return found, found

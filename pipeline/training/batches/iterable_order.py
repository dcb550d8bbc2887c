"""Order and length of an IterableDataset as training data, and what can't be promised of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from pipeline.config.schema import Experiment
from pipeline.errors import ExperimentError
from pipeline.training.batches.iterable_dataset import find_length, is_iterable, offers_state
from pipeline.training.batches.order import Indices, SampleOrder


@dataclass(frozen=True, kw_only=True)
class IterableOrder(SampleOrder):
    """The order of an iterable dataset: that in which it yields its samples.

    A dataset without a length has one epoch of ``train.steps`` steps, in which it may be read several times.
    """

    is_stream = True
    is_endless: bool

    @override
    def permutation(self, epoch: int) -> torch.Tensor:
        return torch.arange(self.samples)

    @override
    def global_batches(self, epoch: int, *, first: int = 0) -> Iterator[Indices]:
        size = self.global_batch_size
        for start in range(first * size, self.samples, size):
            yield np.arange(start, min(start + size, self.samples))

    @classmethod
    def of(cls, dataset: Any, experiment: Experiment) -> "IterableOrder":
        """Return the order of a training set.

        Raises:
            ExperimentError: it is empty, or has no length without ``train.steps``; or a key has no effect on it.
        """
        train, length = experiment.train, find_length(dataset)
        if experiment.sampler is not None:
            raise ExperimentError.of(
                "sampler", "does not apply to an iterable dataset. Remove it, and shuffle in the dataset."
            )
        if experiment.loader.num_workers:
            message = "but the training set is iterable, and each DataLoader worker would read all of it; set 0"
            raise ExperimentError.of("loader.num_workers", f"is {experiment.loader.num_workers}, {message}")
        if length is None and train.steps is None:
            message = "but the training set is iterable and has no length (__len__); set train.steps instead"
            raise ExperimentError.of("train.epochs", f"is {train.epochs}, {message}")
        if length == 0:
            raise ExperimentError.of("data", "the training set is empty; it needs at least one sample")
        size = train.global_batch_size
        samples = train.steps_of(1) * size if length is None else length
        return cls(samples=samples, global_batch_size=size, seed=experiment.seed, is_endless=length is None)


def promises(dataset: Any) -> tuple[str, ...]:
    """Return what holds for an iterable training set, and on what condition; empty for other datasets."""
    if not is_iterable(dataset):
        return ()
    how = "restores the dataset's state_dict" if offers_state(dataset) else "reads the dataset again up to its step"
    return (
        "the training set is iterable. Each worker reads all samples and uses its part of every global batch. Training "
        "does not depend on the number of workers if each process reads the same samples. Four of the first 16 are "
        "compared",
        f"a resumed run {how}, and compares the last samples before the checkpoint",
    )


def notes(dataset: Any, experiment: Experiment) -> tuple[str, ...]:
    """Return `promises`, and what the lack of a length means for evaluation and checkpoints."""
    told = list(promises(dataset))
    checkpoint, train = experiment.checkpoint, experiment.train
    if is_iterable(dataset) and find_length(dataset) is None:
        told.append("the training set has no length. Training is one epoch, which may read the dataset several times")
        if checkpoint.keep and checkpoint.every_steps is None and checkpoint.every_minutes is None:
            told.append("a checkpoint is saved only when training ends; set checkpoint.every_steps to save more")
        if train.evaluate_every_steps is None:
            told.append(
                "validation runs only when training ends; set train.evaluate_every_steps to validate more often"
            )
    return tuple(told)

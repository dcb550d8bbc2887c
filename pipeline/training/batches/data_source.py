"""Opening of a rank's data: loaders and order of its samples."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from pipeline.config import components
from pipeline.config.loader_section import DEFAULT_COLLATE, Loader
from pipeline.config.schema import Experiment
from pipeline.config.values import Component
from pipeline.errors import ExperimentError, TrainingError
from pipeline.protocol.progress import ProgressReporter
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import Training, Trial
from pipeline.training.batches.collation import Collation
from pipeline.training.batches.fetch import Collate
from pipeline.training.batches.iterable import IterableLoader
from pipeline.training.batches.iterable_dataset import find_length, is_iterable
from pipeline.training.batches.iterable_order import IterableOrder, promises
from pipeline.training.batches.iterable_reader import SampleReader
from pipeline.training.batches.loader import BatchLoader, length
from pipeline.training.batches.order import SampleOrder
from pipeline.training.batches.own_order import order_of
from pipeline.training.batches.rank_data import AnyLoader, Datasets, Source
from pipeline.training.model import parts
from pipeline.training.ranks import rank_equality
from pipeline.training.ranks.randomness import generators_kept

_FEW = 4
"""Samples of each set that are read to find out if an evaluation's collate function draws random numbers."""


def open_source(trial: Trial, *, rank: Rank, device: torch.device, datasets: Datasets | None = None) -> Source:
    """Build the loaders of the experiment's datasets. Collective.

    ``datasets`` are those of another trial in this process, which may be large; None builds them.

    Raises:
        ExperimentError: a dataset can't be built, is not map-style, or differs between ranks.
    """
    return _read(trial, datasets or parts.data(trial.experiment, allowed=trial.allowed), rank=rank, device=device)


def train_order(experiment: Experiment, train: Any, *, allowed: tuple[str, ...], silent: bool = False) -> SampleOrder:
    """Return the order of a training set; see `order_of` and `IterableOrder`.

    Raises:
        ExperimentError: the dataset is empty, of another kind, or doesn't go with the experiment.
        TrainingError: a sample that the order needs can't be read.
    """
    if is_iterable(train):
        return IterableOrder.of(train, experiment)
    samples = length(train, what="training")
    return order_of(experiment, train, samples=samples, allowed=allowed, silent=silent)


def held_out_size(experiment: Experiment, dataset: Any, *, what: str) -> int:
    """Return the number of samples of a validation or test set; 0 without it.

    Raises:
        ExperimentError: the dataset is empty, of another kind, or doesn't go with the experiment.
    """
    if dataset is None:
        return 0
    if not is_iterable(dataset):
        return length(dataset, what=what)
    if experiment.loader.num_workers:
        message = f"but the {what} set is iterable, and each DataLoader worker would read all of it; set 0"
        raise ExperimentError.of("loader.num_workers", f"is {experiment.loader.num_workers}, {message}")
    if not (samples := _count_length(dataset, what=what)):
        raise ExperimentError.of("data", f"the {what} set is empty; it needs at least one sample")
    return samples


def _count_length(dataset: Any, *, what: str) -> int:
    """Return the number of samples of a held-out set; one without a length is read once."""
    if (stated := find_length(dataset)) is not None:
        return stated
    with ProgressReporter(f"counting the {what} set", unit="samples") as progress, generators_kept():
        for _ in SampleReader(dataset, what=what, seed=0):
            progress.by(1)
    return progress.done


def _read(trial: Trial, datasets: Datasets, *, rank: Rank, device: torch.device) -> Source:
    experiment, (train, *held_out) = trial.experiment, datasets
    order = train_order(experiment, train, allowed=trial.allowed, silent=not rank.is_first)
    named = zip(("validation", "test"), held_out, strict=True)
    sizes = {what: held_out_size(experiment, dataset, what=what) for what, dataset in named}
    collate, evaluation_collate = _collates(trial, runtime(trial, order=order, rank=rank))
    share = experiment.train.evaluation_share(rank.world_size)

    def loader(dataset: Any, what: str, *, samples: int | None, block: int) -> AnyLoader:
        seed, options = experiment.seed, experiment.loader
        own = collate if what == "training" else evaluation_collate
        if not is_iterable(dataset):
            keeps = what != "training"  # where each step seeds the generators after reading
            return BatchLoader(dataset, options=options, collate=own, seed=seed, device=device, keeps_generators=keeps)
        return IterableLoader(
            dataset,
            what=what,
            samples=samples,
            block=block,
            seed=seed,
            collate=own,
            pin_memory=_pins(options, device),
            keeps_state=what == "training" and rank.is_first and isinstance(trial, Training) and trial.saves,
        )

    count = None if order.is_endless else order.set_size
    train_loader = loader(train, "training", samples=count, block=order.global_batch_size)
    validation, test = (
        loader(dataset, what, samples=sizes[what], block=share * rank.world_size) if dataset is not None else None
        for what, dataset in zip(sizes, held_out, strict=True)
    )
    loaders = {"validation": validation, "test": test}
    there = {what: (loader, sizes[what]) for what, loader in loaders.items() if loader is not None}
    if evaluation_collate is not None and evaluation_collate.is_fixed:
        for each, samples in there.values():
            with suppress(ExperimentError, TrainingError):  # of a sample, which the evaluation reports if it reads it
                each.read([*range(min(_FEW, samples))])
        evaluation_collate.check()
    rank_equality.check_data({"training": (train_loader, order.set_size), **there}, rank=rank)
    if experiment.sampler is not None:
        rank_equality.check_order(order.permutation(0).numpy(), rank=rank)
    return Source(
        train_loader,
        validation,
        order,
        sizes["validation"],
        datasets,
        test,
        sizes["test"],
        promises(train),
        collate,
        evaluation_collate,
    )


def _collates(trial: Trial, known: Mapping[str, int]) -> tuple[Collation | None, Collation | None]:
    """Build the collate functions of training and of evaluations; None for torch's own."""
    loader = trial.experiment.loader

    def built(own: Component | None, key: str) -> Collate | None:
        if own is None or own.target == DEFAULT_COLLATE:
            return None
        collate: Collate = components.build(own, key=key, allowed=trial.allowed, runtime=known)
        return collate

    function = built(loader.collate, key := "loader.collate")
    collate = None if function is None else Collation(function, key=key)
    if loader.evaluation_collate is None:
        return collate, None if function is None else Collation(function, key=key, is_fixed=True)
    function = built(loader.evaluation_collate, key := "loader.evaluation_collate")
    return collate, None if function is None else Collation(function, key=key)


def _pins(options: Loader, device: torch.device) -> bool:
    return device.type == "cuda" if options.pin_memory == "auto" else options.pin_memory


def runtime(trial: Trial, *, order: SampleOrder, rank: Rank) -> Mapping[str, int]:
    """Return the values of ${total_steps}, ${steps_per_epoch} and ${world_size}."""
    return {
        "total_steps": trial.experiment.train.steps_of(order.steps_per_epoch),
        "steps_per_epoch": order.steps_per_epoch,
        "world_size": rank.world_size,
    }

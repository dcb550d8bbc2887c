"""Batches of one rank: which samples, read from the datasets of the experiment, and placed on the device.

They are made before the model and the strategy, whose schedules need the number of steps.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import cached_property, lru_cache, partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.errors import ExperimentError, TrainingError
from pipeline.experiment import components, references
from pipeline.experiment.components import parameters_of
from pipeline.experiment.schema import DEFAULT_COLLATE, Experiment
from pipeline.experiment.values import Component
from pipeline.protocol import progress
from pipeline.protocol.trial import Rank, Split, Training, Trial
from pipeline.strategies.base import Strategy
from pipeline.train import iterable
from pipeline.train.iterable import IterableLoader, is_iterable
from pipeline.train.loader import BatchLoader, Pair, pins, prefetch, to_device
from pipeline.train.order import (
    Indices,
    MicroBatch,
    SampleOrder,
    evaluation_batches,
    evaluation_of_whole_batches,
    keep_generators,
    mix,
    seed_all,
)
from pipeline.train.reader import Collation, copy_dataset, find_datasets_with_epoch, set_epoch
from pipeline.train.same import check_data, check_order, fingerprint
from pipeline.train.storage import DataDigest

Datasets = tuple[Any, Any, Any]  # Training, validation and test set; None in place of a set that there isn't
_MEMORY_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
_DIGESTED = 16  # Samples to compare when a training resumes, a quarter of them of the validation set
_DEPENDS = "Training therefore depends on the number of workers and on train.gradient_accumulation"
_DRAWS = f"the random numbers of loader.collate are drawn for each micro-batch. {_DEPENDS}"
_MIXES = f"the samples of a micro-batch are mixed (train.batch_transform). {_DEPENDS}"


class _Sets(tuple[Any, Any, Any]):
    """Training, validation and test set."""

    version: str | None = None  # Version of the data, if the data function's tuple has one


def build_data(experiment: Experiment, *, allowed: tuple[str, ...]) -> Datasets:
    """Build the training set, the validation set or None, and the test set or None."""
    seed_all(mix(experiment.seed, "data"))
    splits = components.build(references.fill_in(experiment).data, key="data", allowed=allowed)
    if not isinstance(splits, tuple) or len(splits) not in (2, 3):
        kind = f"tuple of {len(splits)}" if isinstance(splits, tuple) else type(splits).__name__
        raise ExperimentError.of(
            "data",
            f"{experiment.data.target} returned a {kind}. Return a tuple of a training set, a validation set or None, "
            "and optionally a test set.",
        )
    train, validation, *rest = splits
    sets = _Sets((train, validation, rest[0] if rest else None))
    sets.version = getattr(splits, "version", None)
    return sets


def train_order(experiment: Experiment, train: Any, *, allowed: tuple[str, ...], silent: bool = False) -> SampleOrder:
    """Return the order of a training set: of a stream its own, else a shuffle, or that of ``sampler``.

    A sampler is a function of (training set, epoch, generator) that returns indices; with an argument ``batch_size``,
    which the file doesn't set, it gets the global batch size. ``silent``: another rank tells its progress.
    """
    if is_iterable(train):
        return iterable.order_of(train, experiment)
    samples, seed, component = _length(train, what="training"), experiment.seed, references.fill_in(experiment).sampler
    new_order = partial(SampleOrder, set_size=samples, global_batch_size=experiment.train.global_batch_size, seed=seed)
    if component is None:
        return new_order(samples=samples)
    parameters = parameters_of(components.resolve(component, key="sampler", allowed=allowed))
    if "batch_size" in parameters and "batch_size" not in component.arguments:
        component = component.model_copy(update={"batch_size": experiment.train.global_batch_size})
    call, target = components.bind(component, key="sampler", allowed=allowed), component.target
    # Files that a sampler opens in a dataset must not be open in forked loader processes.
    dataset = copy_dataset(train) if experiment.loader.num_workers else train
    datasets = find_datasets_with_epoch(dataset)

    def called(epoch: int) -> Indices:
        set_epoch(datasets, epoch, seed=seed)
        with keep_generators(), progress.report_progress_to(lambda _: None) if silent else nullcontext():
            seed_all(own := mix(seed, "order", epoch))
            drawn = call(dataset, epoch, torch.Generator().manual_seed(own))
        return _check_indices(drawn, epoch=epoch, samples=samples, target=target)

    known = lru_cache(maxsize=2)(called)  # measurements begin an epoch several times, and a function may be slow
    count = len(known(0))
    if not np.array_equal(called(0), known(0)):
        raise ExperimentError.of(
            "sampler",
            f"{target} returned different indices when called again for the same epoch, so a resumed run would differ. "
            "Draw only from the generator that it receives.",
        )

    def draw(epoch: int, _: torch.Generator) -> Indices:
        if len(drawn := known(epoch)) != count:
            raise ExperimentError.of(
                "sampler",
                f"{target} returned {len(drawn):,} indices for epoch {epoch}, but {count:,} for epoch 0; return the "
                "same number for each epoch",
            )
        return drawn

    return new_order(samples=count, draw=draw)


def _check_indices(drawn: Any, *, epoch: int, samples: int, target: str) -> Indices:
    """Return what a sampler returned as indices, or raise ExperimentError."""
    try:
        indices = np.asarray(drawn)
    except (TypeError, ValueError, RuntimeError):
        indices = np.empty((), dtype=object)
    if indices.ndim != 1 or indices.dtype.kind not in "iu" or not indices.size:
        kind = type(drawn).__name__ + (f" of {len(indices)} {indices.dtype} numbers" if indices.ndim == 1 else "")
        message = f"{target} returned a {kind} for epoch {epoch}; it must return integer indices, at least one"
        raise ExperimentError.of("sampler", message)
    is_outside = (indices < 0) | (indices >= samples)
    if is_outside.any():
        place = int(is_outside.argmax())
        raise ExperimentError.of(
            "sampler",
            f"{target} returned index {indices[place]} at position {place} for epoch {epoch}, but samples are numbered "
            f"from 0 to {samples - 1}",
        )
    return indices.astype(np.int64)


def held_out_size(experiment: Experiment, dataset: Any, *, what: str) -> int:
    """Return the number of samples of a validation or test set; 0 without it. A stream without a length is counted."""
    if dataset is None:
        return 0
    if not is_iterable(dataset):
        return _length(dataset, what=what)
    iterable.refuse_workers(experiment, what=what)
    if not (samples := iterable.count_samples(dataset, what=what)):
        raise ExperimentError.of("data", f"the {what} set is empty; it needs at least one sample")
    return samples


def _length(dataset: Any, *, what: str) -> int:
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        noun = type(dataset).__name__
        raise ExperimentError.of(
            "data",
            f"the {what} set is {'an' if noun[:1].upper() in 'AEIOU' else 'a'} {noun}, not a torch dataset; it needs "
            "__len__ and __getitem__, or be an IterableDataset",
        )
    if not (samples := len(dataset)):
        raise ExperimentError.of("data", f"the {what} set is empty; it needs at least one sample")
    return samples


class Batches:
    """Micro-batches of one rank, for training and for evaluation."""

    def __init__(self, trial: Trial, *, rank: Rank, device: torch.device, datasets: Datasets | None = None) -> None:
        """Build the datasets of an experiment, and read a few samples of each. Collective.

        ``datasets`` are those of another trial in this process, which may be large; None builds them.
        """
        experiment = self._experiment = trial.experiment
        self.rank, self._device = rank, device
        self.datasets = datasets = datasets or build_data(experiment, allowed=trial.allowed)
        order = self.order = train_order(experiment, datasets[0], allowed=trial.allowed, silent=not rank.is_first)
        splits: tuple[Split, ...] = ("validation", "test")
        self._sizes = {
            split: held_out_size(experiment, dataset, what=split)
            for split, dataset in zip(splits, datasets[1:], strict=True)
        }
        self._is_equal = self._pads = False
        self._checks_rows = True
        self.runtime: Mapping[str, int] = {
            "total_steps": experiment.train.steps_of(order.steps_per_epoch),
            "steps_per_epoch": order.steps_per_epoch,
            "world_size": rank.world_size,
        }
        """Values of ${total_steps}, ${steps_per_epoch} and ${world_size}."""
        self._share = experiment.train.evaluation_share(rank.world_size)
        options = experiment.loader
        saves = rank.is_first and isinstance(trial, Training) and trial.saves

        def built(own: Component | None, key: str) -> Collation:
            if own is None or own.target == DEFAULT_COLLATE:
                return Collation()
            return Collation(components.build(own, key=key, allowed=trial.allowed), key=key)

        def loader(dataset: Any, what: str, samples: int, collate: Collation) -> BatchLoader | IterableLoader:
            is_train, seed = what == "training", experiment.seed
            if not is_iterable(dataset):
                return BatchLoader(
                    dataset,
                    samples=samples,
                    options=options,
                    collate=collate,
                    seed=seed,
                    device=device,
                    keeps_generators=not is_train,  # each step seeds the generators after reading
                )
            return IterableLoader(
                dataset,
                what=what,
                samples=None if is_train and order.is_endless else samples,
                seed=seed,
                collate=collate,
                pin_memory=pins(options, device),
                block=order.global_batch_size if is_train else None,
                keeps_state=is_train and saves,
            )

        filled = references.fill_in(experiment, self.runtime).loader
        self._collate = built(filled.collate, "loader.collate")
        evaluates = Collation(self._collate.function, is_fixed=True)
        if filled.evaluation_collate is not None:
            evaluates = built(filled.evaluation_collate, "loader.evaluation_collate")
        self._train = loader(datasets[0], "training", order.set_size, self._collate)
        self._held_out = {
            split: loader(dataset, split, self._sizes[split], evaluates)
            for split, dataset in zip(splits, datasets[1:], strict=True)
            if dataset is not None
        }
        sets = {"training": (self._train.read, order.set_size, self._train.readable)}
        sets |= {split: (one.read, self._sizes[split], one.readable) for split, one in self._held_out.items()}
        check_data(sets, rank=rank)
        if experiment.sampler is not None:
            check_order(order.permutation(0), rank=rank)

    def use(self, strategy: Strategy) -> None:
        """Make as many passes on each rank as a strategy needs, which is built later."""
        self._is_equal = strategy.needs_equal_passes
        self._pads = self._is_equal and strategy.is_sharded  # which communicates in evaluations, too

    def has(self, split: Split) -> bool:
        """Return True if there is a set of this name."""
        return split in self._held_out

    def size(self, split: Split) -> int:
        """Return the number of samples of a set; 0 without it."""
        return self._sizes[split]

    @property
    def readable(self) -> int:
        """Samples of the training set that can be read by index: the first ones."""
        return self._train.readable

    @cached_property
    def needs_placing(self) -> bool:
        """True if a batch of a loader is not what the model takes, as it is of any type."""
        train = self._experiment.train
        return self._device.type != "cpu" or train.precision == "fp64" or train.memory_format != "contiguous"

    def place(self, batch: Any) -> Any:
        """Return a batch as the model takes it: on the device, in the experiment's type and memory format."""
        if not self.needs_placing:
            return batch
        train = self._experiment.train
        dtype = torch.float64 if train.precision == "fp64" else None
        return to_device(batch, device=self._device, dtype=dtype, memory_format=_MEMORY_FORMATS[train.memory_format])

    def parts(self, step: int) -> list[MicroBatch]:
        """Return this rank's micro-batches of a step, counted from 0, without their data."""
        return self.order.micro_batches(
            step,
            rank=self.rank.rank,
            world_size=self.rank.world_size,
            accumulation=self._experiment.train.gradient_accumulation,
            is_equal=self._is_equal,
        )

    def stream(self, first_step: int, *, last_step: int) -> Iterator[Pair]:
        """Yield this rank's micro-batches of the steps from ``first_step`` to before ``last_step``, see `load`."""
        return self.load(chain.from_iterable(map(self.parts, range(first_step, last_step))))

    def load(self, parts: Iterable[MicroBatch]) -> Iterator[Pair]:
        """Yield training micro-batches with their data: on a GPU, where the next one is copied ahead, or on the CPU."""
        return self._place_pairs(self._train, parts, what="training")

    def evaluation(self, split: Split = "validation", *, by_global_batch: bool = False) -> Iterator[Pair]:
        """Yield this rank's part of a set, which there must be; ``by_global_batch``: its share of each global batch."""
        samples, rank, world_size = self._sizes[split], self.rank.rank, self.rank.world_size
        if by_global_batch:
            parts = evaluation_of_whole_batches(samples, self.order.global_batch_size, rank=rank, world_size=world_size)
        else:
            parts = evaluation_batches(samples, self._share, rank=rank, world_size=world_size, is_equal=self._pads)
        loader = self._held_out[split]
        return self._place_pairs(loader, parts, what=split)

    def evaluation_sample(self, split: Split = "validation") -> Any:
        """Return a batch as large as those of evaluation, on the CPU."""
        parts = evaluation_batches(self._sizes[split], self._share, rank=0, world_size=self.rank.world_size)
        return self.read(next(parts).indices, split)

    def read(self, indices: Iterable[int], split: Split | None = None) -> Any:
        """Return samples of a held-out set, or of the training set, as one batch, on the CPU."""
        if split is not None and split not in self._held_out:
            raise ExperimentError.of("data", f"there is no {split} set")
        return (self._train if split is None else self._held_out[split]).read(list(indices))

    def limit_held_out(self, samples: int) -> None:
        """Evaluate only the first samples of the validation and the test set from now on."""
        self._sizes = {split: min(samples, size) for split, size in self._sizes.items()}

    def skip_row_checks(self) -> None:
        """Accept batches with other numbers of rows than samples: the loss counts its items itself."""
        self._checks_rows = False

    def position(self, step: int) -> Mapping[str, Any] | None:
        """Return the position of iterable data after ``step`` steps; None of data that needs none."""
        place = self._place(step)
        return self._train.position(*place) if isinstance(self._train, IterableLoader) and place[1] else None

    def resume(self, position: Mapping[str, Any] | None, *, step: int, warn: Callable[[str], None]) -> None:
        """Continue iterable data after ``step`` steps, where `position` was as given; None if it wasn't saved."""
        epoch, index = self._place(step)
        if isinstance(self._train, IterableLoader) and index:
            self._train.resume(position, epoch=epoch, index=index, warn=warn, silent=not self.rank.is_first)

    def _place(self, step: int) -> tuple[int, int]:
        """Return the epoch that continues after ``step`` steps, and its samples so far."""
        epoch, done = (0, step) if self.order.is_endless else divmod(step, self.order.steps_per_epoch)
        return epoch, done * self.order.global_batch_size

    @cached_property
    def data(self) -> DataDigest:
        """Digest of the data, read at the first access, on rank 0: before the first step."""
        sizes: dict[str, int] = {"training": 0 if self.order.is_endless else self.order.set_size}
        sizes |= {split: self._sizes[split] for split in self._held_out}
        held_out = self._held_out.get("validation") if not self.order.is_stream else None
        count = _DIGESTED // 4 if held_out is not None else 0
        named = [("training", self._train, self._train.readable, _DIGESTED - count)]
        named += [("validation", held_out, held_out.readable, count)] if held_out is not None else []
        samples: dict[str, str] = {}
        left_out = 0
        for what, loader, readable, number in named:
            for index in np.unique(np.linspace(0, readable - 1, number).astype(int)).tolist():
                try:
                    prints = {fingerprint(loader.read([index])) for _ in range(2)}
                except (ExperimentError, TrainingError):
                    if self.order.is_stream:  # it can't be read again
                        raise
                    prints = set()  # training reports the error if it reads the sample
                if len(prints) == 1:
                    samples[f"sample {index} of the {what} set"] = prints.pop()
                else:
                    left_out += 1
        return DataDigest(sizes=sizes, samples=samples, left_out=left_out)

    @property
    def digest(self) -> str:
        """Short hash of the data and its declaration."""
        return self.data.text(self._experiment.data.model_dump_json())

    @property
    def version(self) -> str:
        """Version that the data function gives its tuple or its training set, if it is a text; else empty."""
        found = (getattr(owner, "version", None) for owner in (self.datasets, self.datasets[0]))
        return next((version for version in found if isinstance(version, str)), "")

    @property
    def notes(self) -> tuple[str, ...]:
        """Promises that the data can't keep."""
        mixes = self._experiment.train.batch_transform is not None
        own = (*([_DRAWS] if self._collate.draws else []), *([_MIXES] if mixes else []))
        if "data" in vars(self) and (left_out := self.data.left_out):
            reason = "differ each time they are read, or could not be read"
            own += (f"a resumed run checks {len(self.data.samples)} samples for changes. {left_out} {reason}",)
        return (*iterable.promises(self.datasets[0]), *own)

    def close(self) -> None:
        """End the loader processes."""
        for loader in (self._train, *self._held_out.values()):
            if isinstance(loader, BatchLoader):
                loader.close()

    def _place_pairs(
        self, loader: BatchLoader | IterableLoader, parts: Iterable[MicroBatch], *, what: str
    ) -> Iterator[Pair]:
        pairs = loader.batches(parts)
        if loader.collate.function is not None and self._checks_rows:
            pairs = self._check_rows(pairs, loader, what=what)
        return prefetch(pairs, place=self.place, device=self._device)

    def _check_rows(self, pairs: Iterator[Pair], loader: BatchLoader | IterableLoader, *, what: str) -> Iterator[Pair]:
        """Refuse batches without a row for each sample, once they are used: then it is known if the loss counts."""
        for part, batch in pairs:
            rows = _count_rows(batch)
            yield part, batch
            asked = len(part.indices)
            if rows in (None, asked) or not self._checks_rows:
                continue
            raise ExperimentError.of(
                loader.collate.key,
                f"returned {rows} rows for {asked} samples of the {what} set. Losses are weighted by the number of "
                "samples, so their mean would be wrong. Leave samples out in the dataset, e.g. "
                "torch.utils.data.Subset(dataset, readable), or return the number of items as Loss.count.",
            )


def _count_rows(batch: Any) -> int | None:
    """Return the length of all fields of a batch; None if they have different lengths, or none."""
    fields: Any = list(batch.values()) if isinstance(batch, Mapping) else batch
    fields = fields if isinstance(fields, list | tuple) else [fields]
    # Lists count in a batch without tensors only: default_collate makes lists of fields, too.
    sizes = {len(field) for field in fields if isinstance(field, Tensor) and field.ndim}
    sizes = sizes or {len(field) for field in fields if isinstance(field, list | tuple)}
    return sizes.pop() if len(sizes) == 1 else None

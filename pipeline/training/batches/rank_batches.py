"""Batches of one rank: which samples, read from a dataset, and placed on the device.

Apart from the loaders, which know of no ranks, and from `TrainContext`, which holds what is trained on the batches.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch

from pipeline.config.schema import Experiment
from pipeline.errors import ExperimentError
from pipeline.protocol.labels import Split
from pipeline.protocol.rank import Rank
from pipeline.strategies.base import Sharded, Strategy
from pipeline.tasks import Supervised, Task
from pipeline.training.batches.collation import Collation
from pipeline.training.batches.data_digest import DataDigest
from pipeline.training.batches.iterable import IterableLoader
from pipeline.training.batches.loader import BatchLoader, prefetched
from pipeline.training.batches.order import MicroBatch, SampleOrder, padded, padded_evaluation
from pipeline.training.batches.placing import to_device
from pipeline.training.batches.rank_data import AnyLoader, Datasets, Source, find_version
from pipeline.training.batches.rows import RowCheck
from pipeline.training.batches.sampled_data import read_digest

MicroBatches = Iterator[tuple[MicroBatch, Any]]
"""A rank's micro-batches with their data, in order."""
_MEMORY_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
_DRAWS = (
    "the random numbers of loader.collate are drawn for each micro-batch. Training therefore depends on the number of "
    "workers and on train.gradient_accumulation"
)
_MIXES = (
    "the samples of a micro-batch are mixed (train.batch_transform). Training therefore depends on the number of "
    "workers and on train.gradient_accumulation"
)


class Batches:
    """Micro-batches of one rank, for training and for evaluation."""

    def __init__(
        self,
        source: Source,
        experiment: Experiment,
        *,
        rank: Rank,
        device: torch.device,
        strategy: Strategy,
        task: Task,
    ) -> None:
        self._source, self._experiment = source, experiment
        self.rank, self._device, self._strategy, self._task = rank, device, strategy, task
        self._rows, self._evaluation_rows = RowCheck(source.collate), RowCheck(source.evaluation_collate)

    @cached_property
    def data(self) -> DataDigest:
        """Digest of the data, read at the first access, on rank 0: before the first step."""
        return read_digest(self._source)

    @property
    def digest(self) -> str:
        """Short hash of the data and its declaration."""
        return self.data.text(self._experiment.data.model_dump_json())

    @property
    def version(self) -> str:
        """Version that the data function gives its data; empty without one."""
        return find_version(self._source.datasets)

    @property
    def order(self) -> SampleOrder:
        """Samples of each global batch."""
        return self._source.order

    @property
    def datasets(self) -> Datasets:
        """Training, validation and test set."""
        return self._source.datasets

    @property
    def validation_samples(self) -> int:
        """Size of the validation set; 0 without one."""
        return self._source.validation_samples

    @property
    def readable(self) -> int:
        """Samples of the training set that can be read by index: the first ones."""
        return self.count_readable(None)

    def count_readable(self, split: Split | None) -> int:
        """Return how many samples of a set can be read by index, the first ones; of the training set if None."""
        loader, size = (self._source.train, self.order.set_size) if split is None else self._held_out(split)
        return min(size, getattr(loader, "readable", size))

    @property
    def has_validation(self) -> bool:
        """True if there is a validation set."""
        return self.has("validation")

    def has(self, split: Split) -> bool:
        """Return True if there is a set of this name."""
        return self._held_out(split)[0] is not None

    def size(self, split: Split) -> int:
        """Return the number of samples of a set; 0 without it."""
        return self._held_out(split)[1]

    def _held_out(self, split: Split) -> tuple[AnyLoader | None, int]:
        source = self._source
        if split == "test":
            return source.test, source.test_samples
        return source.validation, source.validation_samples

    @property
    def dtype(self) -> torch.dtype | None:
        """Type that floating-point inputs are cast to; None leaves them as they are."""
        return torch.float64 if self._experiment.train.precision == "fp64" else None

    def read(self, samples: Sequence[int], *, validation: bool = False) -> Any:
        """Return samples of the training or validation set as one batch, on the CPU.

        Raises:
            ExperimentError: there is no validation set.
        """
        loader = self._source.validation if validation else self._source.train
        if loader is None:
            raise ExperimentError.of("data", "there is no validation set")
        return loader.read(list(samples))

    def reader(self, split: Split | None) -> Callable[[Sequence[int]], Any]:
        """Return a function that reads samples of a set, which there must be, as one batch, on the CPU.

        None: of the training set.
        """
        loader = self._source.train if split is None else self._held_out(split)[0]
        assert loader is not None
        read = loader.read
        return lambda samples: read(list(samples))

    @cached_property
    def needs_placing(self) -> bool:
        """True if a batch of a loader is not what the model takes, as it is of any type."""
        train = self._experiment.train
        return self._device.type != "cpu" or self.dtype is not None or train.memory_format != "contiguous"

    def placed(self, batch: Any) -> Any:
        """Return a loader's batch as the model takes it: on the device, in the experiment's type and memory format."""
        if not self.needs_placing:
            return batch
        memory_format = _MEMORY_FORMATS[self._experiment.train.memory_format]
        return to_device(batch, device=self._device, dtype=self.dtype, memory_format=memory_format)

    def copy_to_device(self, batch: Any) -> Any:
        """Return a loader's batch as a step gets it: on a GPU already, where it is copied during the step before."""
        return batch if self._device.type == "cpu" else self.placed(batch)

    def micro_batches(self, epoch: int, *, first: int = 0) -> Iterator[MicroBatch]:
        """Yield the micro-batches of an epoch from its step ``first`` on, both counted from 0, without their data."""
        split: dict[str, int] = {"world_size": self.rank.world_size, "accumulation": self._accumulation}
        micro_batches = self.order.micro_batches(epoch, rank=self.rank.rank, first=first, **split)
        if not self._strategy.needs_equal_passes:
            return micro_batches
        return padded(micro_batches, order=self.order, first=first, **split)

    def training(self, epoch: int, *, first: int = 0) -> MicroBatches:
        """Yield the micro-batches of an epoch from its step ``first`` on, both counted from 0."""
        return self.load(self.micro_batches(epoch, first=first))

    def load(self, micro_batches: Iterable[MicroBatch]) -> MicroBatches:
        """Read the data of training micro-batches; on a GPU the next one is copied ahead."""
        return self._ahead(self._source.train, micro_batches, what="training")

    def evaluation(self, split: Split = "validation", *, by_global_batch: bool = False) -> MicroBatches:
        """Yield this rank's part of a set, which there must be; ``by_global_batch``: its share of each global batch."""
        loader, samples = self._held_out(split)
        assert loader is not None
        micro_batches = self._evaluation(self.rank.rank, samples=samples)
        if by_global_batch:
            ranks = {"rank": self.rank.rank, "world_size": self.rank.world_size}
            micro_batches = self.order.evaluation_of_whole_batches(samples, **ranks)
        elif isinstance(self._strategy, Sharded):
            micro_batches = padded_evaluation(micro_batches, self._evaluation(0, samples=samples))
        return self._ahead(loader, micro_batches, what=split)

    def validation_sample(self) -> Any:
        """Return a batch as large as those of evaluation, on the CPU."""
        first = next(self._evaluation(0, samples=self.validation_samples))
        return self.read(first.indices, validation=True)

    def limit_held_out(self, samples: int) -> None:
        """Evaluate only the first samples of the validation and the test set from now on."""
        source = self._source
        self._source = source._replace(
            validation_samples=min(samples, source.validation_samples), test_samples=min(samples, source.test_samples)
        )

    def take_note(self) -> str:
        """Return a note for the user on how the training set is read, once; empty if there is none."""
        train = self._source.train
        return train.take_note() if isinstance(train, BatchLoader) else ""

    @property
    def notes(self) -> tuple[str, ...]:
        """Promises that the data can't keep."""
        draws = self._source.collate is not None and self._source.collate.draws
        mixes = self._experiment.train.batch_transform is not None
        own = (*([_DRAWS] if draws else []), *([_MIXES] if mixes else []))
        return (*self._source.notes, *own, *(self.data.notes if "data" in vars(self) else ()))

    def collate(self, split: Split | None) -> Collation | None:
        """Return the collate function of a set, None for torch's own; of the training set if ``split`` is None."""
        return self._source.collate if split is None else self._source.evaluation_collate

    def skip_row_checks(self) -> None:
        """Accept batches with other numbers of rows than samples: losses are not weighted by the samples."""
        self._rows.is_needed = self._evaluation_rows.is_needed = False

    def position(self, step: int) -> Mapping[str, Any] | None:
        """Return the position of iterable data after ``step`` steps; None of data that needs none."""
        train, place = self._source.train, self._place(step)
        return train.position(*place) if isinstance(train, IterableLoader) and place[1] else None

    def resume(self, position: Mapping[str, Any] | None, *, step: int, warn: Callable[[str], None]) -> None:
        """Continue iterable data after ``step`` steps, where `position` was as given; None if it wasn't saved."""
        train, (epoch, index) = self._source.train, self._place(step)
        if isinstance(train, IterableLoader) and index:
            train.resume(position, epoch=epoch, index=index, warn=warn, silent=not self.rank.is_first)

    def _place(self, step: int) -> tuple[int, int]:
        """Return the epoch that goes on after ``step`` steps, and its samples so far."""
        epoch, done = (0, step) if self.order.is_endless else divmod(step, self.order.steps_per_epoch)
        return epoch, done * self.order.global_batch_size

    @property
    def _accumulation(self) -> int:
        return self._experiment.train.gradient_accumulation

    def _ahead(self, loader: AnyLoader, micro_batches: Iterable[MicroBatch], *, what: str) -> MicroBatches:
        batches = loader.batches(micro_batches)
        if (rows := self._rows if what == "training" else self._evaluation_rows).is_needed:
            names = isinstance(loader, BatchLoader)
            batches = _complete(batches, rows, partial(rows.check, read=loader.read, what=what, names=names))
        if isinstance(self._task, Supervised):
            batches = _without_ignored(batches, self._task)
        return prefetched(batches, place=self.placed, device=self._device)

    def _evaluation(self, rank: int, *, samples: int) -> Iterator[MicroBatch]:
        world_size, train = self.rank.world_size, self._experiment.train
        share = train.evaluation_share(world_size)
        split = {"world_size": world_size, "accumulation": train.gradient_accumulation, "share": share}
        return self.order.evaluation_micro_batches(samples, rank=rank, **split)


def _complete(batches: MicroBatches, rows: RowCheck, check: Callable[[MicroBatch, Any], None]) -> MicroBatches:
    """Refuse batches without a row for each sample, as long as this matters."""
    for micro_batch, batch in batches:
        if rows.is_needed:
            check(micro_batch, batch)
        yield micro_batch, batch


def _without_ignored(batches: MicroBatches, task: Supervised) -> MicroBatches:
    """Refuse batches of which the loss would ignore every target."""
    for micro_batch, batch in batches:
        task.refuse_ignored(batch)
        yield micro_batch, batch

"""What the scripts of this folder share: model, optimizer and batches, in the order in which pipeline deals them."""

import argparse
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from workloads import WORKLOADS, Model, Samples, order


class Job:
    """A workload with its parts."""

    def __init__(self) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("--workload", choices=WORKLOADS, required=True)
        parser.add_argument("--workers", type=int, required=True)
        parser.add_argument("--out", required=True, help="folder of the results")
        arguments = parser.parse_args()
        self.name: str = arguments.workload
        self.work = WORKLOADS[arguments.workload]
        self.workers: int = arguments.workers
        self.out: str = arguments.out
        torch.set_num_threads(1)

    def model(self) -> nn.Module:
        """Return the model with its first weights."""
        return Model(self.name, self.out)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of the model's parameters."""
        options = dict(self.work.optimizer)
        made: torch.optim.Optimizer = getattr(torch.optim, options.pop("_target_").rpartition(".")[2])(
            model.parameters(), **options
        )
        return made

    def loader(self, rank: int | None = None) -> DataLoader[Any]:
        """Return the batches of a rank; without one those of all ranks, for a library that distributes batches."""
        data = Samples(self.name)
        ranks = range(self.workers) if rank is None else [rank]
        return DataLoader(data, batch_sampler=Batches(data, ranks, workers=self.workers, size=self.work.batch))  # type: ignore[arg-type]


class Batches:
    """A batch sampler: the parts of some ranks of each global batch, epoch after epoch."""

    drop_last = False

    def __init__(self, data: Samples, ranks: Any, *, workers: int, size: int) -> None:
        self._data, self._ranks, self._size, self._epoch = data, ranks, size, 0
        self.batch_size = size // workers

    def __len__(self) -> int:
        return len(self._data) // self._size * len(self._ranks)

    def __iter__(self) -> Iterator[list[int]]:
        indices = order(self._data, self._epoch).tolist()
        self._epoch += 1
        for start in range(0, len(indices), self._size):
            for rank in self._ranks:
                first = start + rank * self.batch_size
                yield indices[first : first + self.batch_size]


def local_rank() -> int:
    """Return the rank that a launcher has set."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def train(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
    """Train with a hand-written loop."""
    for _ in range(job.work.epochs):
        for batch in batches:
            loss = model(**batch)["loss"]
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()

"""What the peers share: the same model, optimizer and batches in the same order, and what they write down.

Batches come through torch's DataLoader in the training process. Its dataset reads a whole batch with one index
operation, as pipeline does with a TensorDataset; ``--loader stock`` reads sample by sample, as TensorDataset itself
does, and ``--loader none`` indexes the tensors without a DataLoader. Other datasets are read sample by sample.
"""

import argparse
import json
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from workloads import LOG_EVERY, SEED, WORKLOADS, build

from pipeline.train.order import SampleOrder
from pipeline.train.seeds import mix


class Job:
    """What the command line asks for, and the parts to do it with."""

    def __init__(self) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("--workload", choices=WORKLOADS, required=True)
        parser.add_argument("--workers", type=int, required=True)
        parser.add_argument("--out", type=Path, required=True, help="where rank 0 writes its JSON")
        parser.add_argument("--epochs", type=int)
        parser.add_argument("--loader", choices=("rows", "stock", "none"), default="rows")
        arguments = parser.parse_args()
        self.name: str = arguments.workload
        self.work = WORKLOADS[arguments.workload]
        self.workers: int = arguments.workers
        self.out: Path = arguments.out.absolute()
        self.epochs: int = arguments.epochs or self.work.epochs
        self.kind: str = arguments.loader

    def model(self) -> nn.Module:
        """The model with the weights that pipeline's has at first."""
        torch.set_num_threads(1)
        torch.manual_seed(mix(SEED, "model"))
        made: nn.Module = build(self.work.model)
        return made

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of the model's parameters."""
        made: torch.optim.Optimizer = build(self.work.optimizer, model.parameters())
        return made

    def loader(self, *, ranks: range) -> Any:
        """Batches of these ranks in turn; of all, for a library that deals batches out itself."""
        data = build(self.work.data)[0]
        order = SampleOrder(samples=len(data), set_size=len(data), global_batch_size=self.work.batch, seed=SEED)
        batches: Any = Batches(order, ranks=ranks, world_size=self.workers)
        if self.kind == "stock" or not isinstance(data, TensorDataset):
            loaders = self.work.loaders
            return DataLoader(data, batch_sampler=batches, num_workers=loaders, persistent_workers=bool(loaders))
        if self.kind == "none":
            return Direct(data.tensors, batches)
        return DataLoader(Rows(data.tensors), batch_sampler=batches, collate_fn=_as_is)


class Batches:
    """A batch sampler that deals pipeline's global batches, epoch after epoch."""

    drop_last = False

    def __init__(self, order: SampleOrder, *, ranks: range, world_size: int) -> None:
        self._order, self._ranks, self._world_size = order, ranks, world_size
        self._epoch = 0
        self.batch_size = order.global_batch_size // world_size

    def __len__(self) -> int:
        return self._order.steps_per_epoch * len(self._ranks)

    def __iter__(self) -> Iterator[list[int]]:
        first = self._epoch * self._order.steps_per_epoch
        self._epoch += 1
        for step in range(first, first + self._order.steps_per_epoch):
            for rank in self._ranks:
                (part,) = self._order.micro_batches(step, rank=rank, world_size=self._world_size)
                yield part.indices


class Rows(Dataset[Any]):
    """A TensorDataset, indexed once for a whole batch."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self._tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[index] for tensor in self._tensors)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        index = torch.tensor(indices)
        return tuple(tensor[index] for tensor in self._tensors)


class Direct:
    """Batches without a DataLoader."""

    def __init__(self, tensors: tuple[Tensor, ...], batches: Batches) -> None:
        self._rows, self._batches = Rows(tensors), batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return map(self._rows.__getitems__, self._batches)


class Record:
    """Losses, and when the first step and each epoch were done, in seconds since 1970."""

    def __init__(self, job: Job, *, steps_per_epoch: int) -> None:
        self._job = job
        self._steps_per_epoch = steps_per_epoch
        self._first_step = 0.0
        self._epochs: list[float] = []
        self._losses: list[float] = []
        self._waiting: list[Tensor] = []
        self._step = 0

    def step(self, loss: Tensor) -> None:
        """An optimizer step is done; ``loss`` is that of this rank's share."""
        self._step += 1
        self._waiting.append(loss.detach())
        if self._step == 1:
            self._first_step = time.time()
        is_last = self._step % self._steps_per_epoch == 0
        if is_last or self._step % self._steps_per_epoch % LOG_EVERY == 0:
            self._losses += torch.stack(self._waiting).tolist()
            self._waiting = []
        if is_last:
            self._epochs.append(time.time())

    def write(self) -> None:
        """Rank 0 writes all down, with the mean loss over the ranks. Collective."""
        losses = torch.tensor(self._losses, dtype=torch.float64)
        peak = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(losses, dist.ReduceOp.SUM)
            dist.all_reduce(peak, dist.ReduceOp.MAX)
            losses /= dist.get_world_size()
            if dist.get_rank():
                return
        result = {
            "first_step": self._first_step,
            "epochs": self._epochs,
            "losses": losses.tolist(),
            "worker_peak_mb": peak.item(),
        }
        self._job.out.write_text(json.dumps(result))


def _as_is(batch: Any) -> Any:
    return batch

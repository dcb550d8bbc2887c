"""Data and functions for tests of the key ``sampler``, named by ``_target_: toy_orders.NAME``."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset
from toys import Plain, regression

from pipeline.data import draw_weighted

CLASSES = (37, 5, 1)
"""Samples of each class of `imbalanced`."""
STOPPED = 3
"""Step within the first epoch of each case, after which it is resumed."""
CASES: dict[str, dict[str, Any]] = {
    "balanced": {
        "model": {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 3},
        "data": {"_target_": "toy_orders.imbalanced"},
        "loss": {"_target_": "torch.nn.CrossEntropyLoss"},
        "sampler": {"_target_": "pipeline.data.balanced"},
    },
    "length": {
        "model": {"_target_": "torch.nn.Linear", "in_features": 30, "out_features": 1},
        "data": {"_target_": "toy_orders.ragged"},
        "loader": {"collate": {"_target_": "toy_orders.padded"}},
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 1e-3},
        "sampler": {"_target_": "pipeline.data.by_length"},
    },
    "function": {
        "sampler": {"_target_": "toy_orders.twice"},
        "train": {"global_batch_size": None, "batch_size_per_worker": 2},
        "parallel": {"strategy": "ddp", "launcher": "torchrun", "workers": 4},
    },
    "iterable": {
        "data": {"_target_": "toy_streams.stream", "kind": "Shuffled", "validation": True},
        "train": {"global_batch_size": 6},  # four in the last batch of an epoch, so that some ranks have none
    },
    "endless": {
        "data": {"_target_": "toy_streams.stream", "kind": "Stateful", "validation": True},
        "train": {"epochs": None, "steps": 8, "global_batch_size": 6},
    },
}
SAVED_FOR_ALL = ("endless",)
"""Cases whose checkpoints of several workers are continued by one."""
_calls = itertools.count()


def imbalanced(counts: Sequence[int] = CLASSES) -> tuple[Dataset[Any], Dataset[Any]]:
    """Classes of very different sizes."""
    targets = torch.cat([torch.full((count,), number) for number, count in enumerate(counts)])
    targets = targets[torch.randperm(len(targets), generator=torch.Generator().manual_seed(1))]
    inputs = torch.randn(len(targets), 3, generator=torch.Generator().manual_seed(2)) + targets[:, None]
    return TensorDataset(inputs, targets), TensorDataset(inputs[:9], targets[:9])


def ragged(samples: int = 43) -> tuple[Dataset[Any], None]:
    """Sequences of 1 to 30 tokens, each with its sum."""
    lengths = torch.randint(1, 31, (samples,), generator=torch.Generator().manual_seed(3)).tolist()
    return Plain([(torch.ones(length), torch.tensor([float(length)])) for length in lengths]), None


def padded() -> Any:
    """Collate function that pads to the longest."""

    def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        rows = torch.zeros(len(samples), 30)
        for row, (tokens, _) in zip(rows, samples, strict=True):
            row[: len(tokens)] = tokens
        return rows, torch.stack([target for _, target in samples])

    return collate


def hard_first(samples: Any, epoch: int, generator: torch.Generator, share: float = 1.0) -> Tensor:
    """A part of the samples at random, those with the largest targets first, in every other epoch the last."""
    drawn = torch.randperm(len(samples), generator=generator)[: round(share * len(samples))]
    targets = regression()[0][:][1].flatten()[drawn]
    return drawn[targets.argsort(descending=epoch % 2 == 0)]


def shuffled(samples: Any, epoch: int, generator: torch.Generator) -> Tensor:
    return torch.randperm(len(samples), generator=generator)


def by_global_generators(samples: Any, epoch: int, generator: torch.Generator) -> Any:
    return np.random.permutation(len(samples))


def twice(samples: Any, epoch: int, generator: torch.Generator) -> list[int]:
    return [*range(len(samples)), *range(len(samples))]


def other_each_time(samples: Any, epoch: int, generator: torch.Generator) -> Any:
    return np.roll(np.arange(len(samples)), next(_calls))


def fewer_each_epoch(samples: Any, epoch: int, generator: torch.Generator) -> range:
    return range(len(samples) - epoch)


def given(samples: Any, epoch: int, generator: torch.Generator, indices: Any) -> Any:
    return indices


def fails(samples: Any, epoch: int, generator: torch.Generator) -> Any:
    raise LookupError("no such curriculum")


def by_weights(samples: Any, epoch: int, generator: torch.Generator, weights: Any = None) -> Any:
    """Draws by a weight for each sample: its index, or those given."""
    return draw_weighted(torch.arange(float(len(samples))) if weights is None else weights, generator)

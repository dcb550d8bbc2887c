"""A user's components: small ones that work, and one for each way in which user code goes wrong."""

import os
import signal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

FEATURES, CLASSES = 4, 3


def points(samples: int = 50) -> tuple[TensorDataset, TensorDataset]:
    """Points in classes that a linear model can tell apart, and as many again for validation."""
    return _points(samples), _points(samples)


def only_training(samples: int = 50) -> tuple[TensorDataset, None]:
    return _points(samples), None


def no_samples() -> tuple[TensorDataset, TensorDataset]:
    return _points(0), _points(10)


def ragged() -> tuple[Dataset[tuple[Tensor, int]], None]:
    """Samples of different sizes."""
    return _Ragged(), None


def alone() -> TensorDataset:
    return _points(50)


def from_a_file() -> tuple[TensorDataset, TensorDataset]:
    raise FileNotFoundError("points.csv is not on this disk")


class Net(nn.Module):
    """A linear model. On rank ``rank``, its third batch in training ends in ``fault``."""

    def __init__(self, fault: str = "", rank: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.fault = fault
        self.rank = rank
        self.batches = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.batches += self.training
        if self.fault and self.batches == 3 and _rank() == self.rank:
            self._fail()
        return self.linear(inputs)

    def _fail(self) -> None:
        if self.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "exits":
            raise SystemExit("a library that gives up")
        raise ZeroDivisionError("the model's own mistake")


class Normed(nn.Module):
    """With batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


def not_a_module() -> str:
    return "a model"


def loss_of_each_sample(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def per_sample() -> object:
    return loss_of_each_sample


class NotANumber(nn.Module):
    """A loss that is NaN."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.sum() * float("nan")


class _Ragged(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.ones(1 + index % 3), 0


def _points(samples: int) -> TensorDataset:
    inputs = torch.randn(samples, FEATURES, generator=torch.Generator().manual_seed(5))
    return TensorDataset(inputs, inputs[:, :CLASSES].argmax(dim=1))


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


class Hungry(Net):
    """On rank ``rank``, batches of more than ``limit`` samples need more memory than any machine has."""

    def __init__(self, limit: int, rank: int = 0) -> None:
        super().__init__()
        self.limit = limit
        self.hungry = rank

    def forward(self, inputs: Tensor) -> Tensor:
        if len(inputs) > self.limit and _rank() == self.hungry:
            torch.empty(2**60, dtype=torch.uint8)
        return self.linear(inputs)

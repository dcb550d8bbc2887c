"""A user's components: small ones that work, and one for each way in which user code goes wrong."""

import ctypes
import hashlib
import os
import random
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

FEATURES, CLASSES = 4, 3


def points(samples: int = 50) -> tuple[TensorDataset, TensorDataset]:
    """Points in classes that a linear model can tell apart, and as many again for validation."""
    return _points(samples), _points(samples)


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
        self.batches = 0  # counted for a fault only: otherwise a warning would say that checkpoints lack it

    def forward(self, inputs: Tensor) -> Tensor:
        self.batches += bool(self.training and self.fault)
        if self.batches == 3 and _rank() == self.rank:
            self._fail()
        return self.linear(inputs)

    def _fail(self) -> None:
        if self.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault in ("SIGINT", "SIGTERM"):
            signal.raise_signal(signal.Signals[self.fault])
            return
        if self.fault == "exits":
            raise SystemExit("a library that gives up")
        raise ZeroDivisionError("the model's own mistake")


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


def slow_points(ms: float, samples: int = 64) -> tuple[Dataset[tuple[Tensor, Tensor]], None]:
    """Points that take ``ms`` each to read."""
    return _Slow(_points(samples), ms), None


class Sluggish(Net):
    """Takes ``ms`` for each batch, on rank ``rank`` or, if it is negative, on all."""

    def __init__(self, ms: float, rank: int = -1, width: int = 1) -> None:
        super().__init__()
        self.wide = nn.Linear(CLASSES, width).requires_grad_(width > 1)
        self.deep = nn.Linear(width, width).requires_grad_(width > 1)
        self.ms = ms
        self.slow = rank

    def forward(self, inputs: Tensor) -> Tensor:
        if self.slow in (-1, _rank()):
            time.sleep(self.ms / 1000)
        outputs = self.linear(inputs)
        return outputs + self.deep(self.wide(outputs)).mean(dim=1, keepdim=True)


class _Slow(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, points: TensorDataset, ms: float) -> None:
        self.points = points
        self.ms = ms

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.ms / 1000)
        return self.points[index]


class Patient(nn.Module):
    """With dropout, and slow enough to be interrupted in the middle: ``ms`` for each batch."""

    def __init__(self, ms: float = 8.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, CLASSES))
        self.ms = ms

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            time.sleep(self.ms / 1000)
        outputs: Tensor = self.layers(inputs)
        return outputs


class Locked(TensorDataset):
    """Deadlocks on rank ``rank`` when it has been asked for some samples."""

    def __init__(self, samples: int, rank: int) -> None:
        super().__init__(*_points(samples).tensors)
        self.rank = rank
        self.read = 0
        self.lock = threading.Lock()

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        self.read += 1
        if self.read > 40 and _rank() == self.rank:
            self._wait_for_myself()
        return super().__getitem__(index)

    def _wait_for_myself(self) -> None:
        with self.lock, self.lock:
            raise AssertionError("nobody gets here")


def locked(rank: int, samples: int = 50) -> tuple[Locked, None]:
    return Locked(samples, rank), None


def holed(index: int, value: float = float("nan")) -> tuple[TensorDataset, None]:
    """A sample with a value that is not finite, or that `Spiky` makes infinite."""
    dataset = _points(50)
    dataset.tensors[0][index, 1] = value
    return dataset, None


class Spiky(nn.CrossEntropyLoss):
    """Infinite, with finite gradients, if an output is far off."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        spike = torch.where(outputs.detach().abs().max() > 1e3, float("inf"), 0.0)
        return super().forward(outputs.clamp(-30, 30), targets) + spike


class Unreadable(TensorDataset):
    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if index == 7:
            raise OSError("no such image")
        return super().__getitem__(index)


def unreadable(where: str) -> tuple[TensorDataset, TensorDataset]:
    """One sample of the training or the validation set can't be read."""
    broken = Unreadable(*_points(50).tensors)
    return (broken, _points(20)) if where == "training" else (_points(50), broken)


class Steep(nn.CrossEntropyLoss):
    """Finite, with gradients that are not."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().forward(outputs, targets) + (0 * outputs.sum()).sqrt()


class Keyed(Net):
    """Refuses a key that isn't the right one, which it doesn't keep."""

    def __init__(self, key: str, digest: str) -> None:
        super().__init__()
        if hashlib.sha256(key.encode()).hexdigest() != digest:
            raise ValueError("this is not the key")


class Talkative(Sluggish):
    """Says where it computes."""

    has_printed = False

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.has_printed:
            print(f"computing on {socket.gethostname()}")  # noqa: T201 - what ranks print comes to the run
        self.has_printed = True
        return super().forward(inputs)


class Paced(Patient):
    """Slow until the file ``release`` is there, for tests that do things to a training and then want to see its end.

    Without dropout, which depends on how a batch is dealt to ranks: another number of workers would drop others.
    """

    def __init__(self, release: str, ms: float = 50.0) -> None:
        super().__init__(ms)
        self.layers[2] = nn.Identity()
        self.release = Path(release)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.ms and self.release.exists():
            self.ms = 0.0
        return super().forward(inputs)


class Augmented(TensorDataset):
    """Adds noise to what is read, from each generator that a dataset may use."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        inputs, target = super().__getitem__(index)
        return inputs + 0.1 * torch.rand(FEATURES) + 0.1 * random.random() + 0.1 * float(np.random.rand()), target


def augmented(samples: int = 50) -> tuple[TensorDataset, TensorDataset]:
    return Augmented(*_points(samples).tensors), _points(samples)


def no_tracker(folder: Path) -> object:
    raise PermissionError("no such account")


class Crashing(Net):
    """Reads address 0, as a library with a bug might."""

    def forward(self, inputs: Tensor) -> Tensor:
        ctypes.string_at(0)
        return super().forward(inputs)


class Lingering(Net):
    """Leaves a thread and a process behind."""

    def __init__(self) -> None:
        super().__init__()
        threading.Thread(target=time.sleep, args=(600,)).start()
        subprocess.Popen(["sleep", "600"])

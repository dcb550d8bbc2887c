"""Data and models that ranks draw for themselves: the same on all ranks, or refused before the first step."""

import random
import uuid
from typing import Any

import numpy as np
import pytest
import torch
import toys
from ranks import Ranks
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from pipeline.errors import ExperimentError
from pipeline.protocol.trial import Rank
from pipeline.train.state import State

SAMPLES = 40
HERE = "test_rank_equality"

# Data


def _pairs(order: Any) -> tuple[Dataset[Any], Dataset[Any]]:
    values = torch.arange(float(SAMPLES)).reshape(-1, 1)[torch.as_tensor(np.array(order))]
    return TensorDataset(values[:34], values[:34]), TensorDataset(values[34:], values[34:])


def split_by_all_generators() -> Any:
    order = list(torch.randperm(SAMPLES))
    random.shuffle(order)
    return _pairs([int(index) for index in np.random.permutation(order)])


def split_without_seed() -> Any:
    return _pairs(np.random.default_rng().permutation(SAMPLES))


def split_in_another_place() -> Any:
    """The same training set, another validation set."""
    train, validation = _pairs(range(SAMPLES))
    return train, TensorDataset(*(values + torch.distributed.get_rank() for values in validation.tensors))  # type: ignore[attr-defined]


def of_other_sizes() -> Any:
    return _pairs(range(SAMPLES))[0], TensorDataset(*2 * [torch.ones(4 + torch.distributed.get_rank(), 1)])


class Jittered(Dataset[Any]):
    """Inputs with noise from a generator of its own, without a seed; ``labels`` by sample."""

    def __init__(self, labels: Any) -> None:
        self._noise = np.random.default_rng()
        self._labels = labels

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([self._noise.random()]).float(), torch.tensor([float(self._labels[index])])


def noisy_on_purpose() -> Any:
    return Jittered(range(SAMPLES)), None


def noisy_and_shuffled() -> Any:
    return Jittered(np.random.default_rng().permutation(SAMPLES)), None


# Models


class Keeps(nn.Module):
    """A model with something of its own outside of parameters and buffers."""

    def __init__(self, what: str = "nothing") -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.inner = nn.Identity()
        own = np.random.default_rng()
        if what == "drawn":
            self.inner.kept = [torch.rand(2), np.random.rand(2), random.random(), {"k": np.float32(np.random.rand())}]  # type: ignore[assignment]
        elif what == "tensor":
            self.inner.kept = [torch.tensor(own.random())]  # type: ignore[assignment]
        elif what == "array":
            self.kept = own.random(2)
        elif what == "rank":
            self.number, self.is_speaker = torch.distributed.get_rank(), torch.distributed.get_rank() == 0
        elif what == "weights":
            nn.init.constant_(self.layer.weight, own.random())
        elif what == "text":
            self.name = uuid.uuid4().hex

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        return outputs


class Margins(nn.Module):
    """A loss with targets of its own making."""

    def __init__(self, seeded: bool) -> None:
        super().__init__()
        self.margin = torch.tensor(np.random.rand() if seeded else np.random.default_rng().random())

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets - self.margin).pow(2).mean()


def _built(
    rank: Rank, *, data: str = "split_by_all_generators", model: str = "nothing", strategy: str = "ddp",
    seeded_loss: bool = True,
) -> State:  # fmt: skip
    sections = {
        "model": {"_target_": f"{HERE}.Keeps", "what": model},
        "data": {"_target_": f"{HERE}.{data}"},
        "loss": {"_target_": f"{HERE}.Margins", "seeded": seeded_loss},
        "train": {"epochs": 1, "precision": "fp32"},
    }
    return toys.built(rank=rank, strategy=strategy, workers=2, **sections)


# Which of the samples that are looked at is named is left to chance: two orders without a seed may begin alike.
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "split": ({"data": "split_without_seed"}, "data", "of the training set differs between rank 0 and rank 1"),
    "validation": ({"data": "split_in_another_place"}, "data", "sample 0 of the validation set differs"),
    "sizes": (
        {"data": "of_other_sizes"},
        "data",
        "rank 0 has 34 training samples, 4 validation samples; rank 1 has 34 training samples, 5 validation samples",
    ),
    "labels": ({"data": "noisy_and_shuffled"}, "data", "of the training set differs"),
    "tensor": ({"model": "tensor"}, "model", "inner.kept[0] differs between rank 0 and rank 1"),
    "array": ({"model": "array"}, "model", "kept differs"),
    "loss": ({"seeded_loss": False}, "loss", "margin differs"),
    "shards": ({"model": "weights", "strategy": "fsdp"}, "model", "layer.weight differs"),
}
ACCEPTED: dict[str, dict[str, Any]] = {
    "seeded": {},
    "noise on purpose": {"data": "noisy_on_purpose"},
    "drawn": {"model": "drawn"},
    "rank": {"model": "rank"},
    "text": {"model": "text"},
    "weights that ddp sends": {"model": "weights"},
}


def _build_all(rank: Rank) -> dict[str, dict[str, Any]]:
    """Return what a rank has drawn of each case that is accepted."""
    for name, (given, key, said) in REFUSED.items():
        with pytest.raises(ExperimentError) as refused:
            _built(rank, **given)
        (problem,) = refused.value.problems
        assert problem.key == key, name
        assert said in problem.message, name
    return {name: _drawn(_built(rank, **given)) for name, given in ACCEPTED.items()}


def _drawn(s: State) -> dict[str, Any]:
    """What was drawn on this rank: the samples, and what the model keeps."""
    model: Any = s.model
    kept = getattr(model.inner, "kept", [])
    labels = [s.batches.read([index]) for index in range(4)]
    return {
        "labels": [batch[1].tolist() for batch in labels],
        "kept": [getattr(one, "tolist", lambda one=one: one)() for one in kept[:3]],
        "weight": model.layer.weight.item(),
        "margin": s.task.loss.margin.item(),
    }


def test_ranks_draw_alike_or_are_refused() -> None:
    with Ranks(2, timeout_s=300) as ranks:
        first, second = ranks.call(_build_all)
    for name in ACCEPTED:
        assert first[name] == second[name], name
    for name in ("seeded", "drawn"):  # one worker draws what two draw
        assert first[name] == _drawn(_built(Rank(), **ACCEPTED[name], strategy="single")), name
    assert len(first["drawn"]["kept"]) == 3

"""Images and convolutions in channels_last: the same training, in another layout."""

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import toys
from torch.nn.utils.rnn import pack_sequence

from pipeline.errors import ExperimentError
from pipeline.experiment.load import load
from pipeline.protocol.rank import Rank
from pipeline.train.build import build
from pipeline.train.loader import to_device

NETWORK: dict[str, Any] = {
    "model": {"_target_": "pipeline.models.resnet18", "num_classes": 10, "in_channels": 1, "width": 2},
    "data": {"_target_": "toys.images"},
    "loss": {"_target_": "torch.nn.CrossEntropyLoss"},
}
RESNET = Path(__file__).parents[2] / "experiments" / "resnet.yaml"


def sections(layout: str, *, precision: str = "fp64") -> dict[str, Any]:
    train = {"epochs": 1, "global_batch_size": 32, "memory_format": layout, "precision": precision}
    return {**NETWORK, "train": train}


def test_both_layouts_train_the_same() -> None:
    """In fp64, where nothing but the order of sums differs; evaluation included."""
    plain, turned = (toys.trained(**sections(layout))[1] for layout in ("contiguous", "channels_last"))
    for name, steps in (("train/loss", 3), ("validation/loss", 1)):
        assert plain.series(name) == pytest.approx(turned.series(name), rel=1e-6)
        assert len(plain.series(name)) == steps


def test_weights_and_batches_lie_as_asked() -> None:
    s = build(toys.trial(**sections("channels_last", precision="fp32")), rank=Rank())
    seen = []
    s.model.conv1.register_forward_hook(lambda module, given, out: seen.append((given[0], out)))  # type: ignore[union-attr, operator]
    batch = s.batches.place([torch.zeros(2, 3, 5, 5)[:, :1].expand(2, 1, 5, 5).contiguous(), torch.zeros(2)])
    s.model(batch[0])

    ((_, out),) = seen
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert not out.is_contiguous()
    weight = s.model.layer1[0].conv1.weight  # type: ignore[index, union-attr]
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert not weight.is_contiguous()


def test_only_images_are_laid_out_anew() -> None:
    image, text = torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, 4)
    moved = to_device([image, text], device=torch.device("cpu"), dtype=torch.float64, memory_format=torch.channels_last)
    assert moved[0].is_contiguous(memory_format=torch.channels_last)
    assert moved[1].is_contiguous()
    assert {one.dtype for one in moved} == {torch.float64}
    assert to_device(image, device=torch.device("cpu"), dtype=None).is_contiguous()


class Graph:
    """A batch that only knows how to move itself, as those of PyTorch Geometric."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def to(self, device: torch.device) -> "Graph":
        return Graph(device.type)


class Named(NamedTuple):
    value: Any


@dataclass(frozen=True)
class Frozen:
    value: Any
    length: Any = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", torch.ones(2))


CONTAINERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "list": (lambda value: [value], itemgetter(0)),
    "mapping": (lambda value: {"key": value}, itemgetter("key")),
    "namedtuple": (Named, attrgetter("value")),
    "frozen dataclass": (Frozen, attrgetter("value")),
}
"""How each kind is made, and read."""


@pytest.mark.parametrize("kind", CONTAINERS)
def test_what_a_batch_contains_is_moved(kind: str) -> None:
    """The device meta stands for a GPU."""
    contain, read = CONTAINERS[kind]
    sequences = pack_sequence([torch.ones(3), torch.ones(2)])
    batch = contain([torch.ones(1, dtype=torch.int32), (Graph(), sequences), Frozen(torch.ones(1)), "a text"])
    moved = to_device(batch, device=torch.device("meta"), dtype=torch.float64)

    count, (graph, words), frozen, text = read(moved)
    assert type(moved) is type(batch)
    assert (count.device.type, count.dtype) == ("meta", torch.int32)
    assert graph.device == "meta"
    assert (words.data.device.type, words.data.dtype) == ("meta", torch.float32)  # moved as a whole
    assert words.batch_sizes.device.type == "cpu"  # where torch needs it
    assert [one.device.type for one in (frozen.value, frozen.length)] == ["meta", "meta"]
    assert text == "a text"
    assert read(batch)[0].device.type == read(batch)[2].value.device.type == "cpu"


class InPlace:
    """Moves in place and returns nothing."""

    def to(self, device: torch.device) -> None:
        self.device = device.type


def test_an_object_that_moves_in_place_stays_in_the_batch() -> None:
    (moved,) = to_device([InPlace()], device=torch.device("meta"), dtype=None)
    assert moved.device == "meta"


def test_fsdp_refuses_it_with_the_line() -> None:
    with pytest.raises(ExperimentError) as caught:
        load(RESNET, ["train.memory_format=channels_last", "parallel.strategy=fsdp"])
    (problem,) = caught.value.problems
    assert problem.key == "parallel.strategy"
    assert "train.memory_format: contiguous" in problem.message

"""Batches on their way to the device: types, memory layouts, containers, and one ahead."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import toys
from loading import part
from torch.nn.utils.rnn import pack_sequence

from pipeline.train import batches, loader
from pipeline.train.loader import Pair, copy_one_ahead, prefetch, to_device

CPU, META = torch.device("cpu"), torch.device("meta")  # The second one stands for a GPU


# To the device


def test_only_floating_point_inputs_are_cast_and_only_images_laid_out_anew() -> None:
    batch = {"x": torch.ones(2), "c": torch.ones(2) * 1j, "n": [torch.ones(2, dtype=torch.int32)], "name": "a"}
    moved = to_device(batch, device=CPU, dtype=torch.float64)
    assert (moved["x"].dtype, moved["n"][0].dtype, moved["name"]) == (torch.float64, torch.int32, "a")
    assert moved["c"].dtype is torch.complex128
    assert to_device(batch, device=CPU, dtype=None)["x"].dtype is torch.float32
    image, text = torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, 4)
    moved = to_device([image, text], device=CPU, dtype=torch.float64, memory_format=torch.channels_last)
    assert moved[0].is_contiguous(memory_format=torch.channels_last)
    assert moved[1].is_contiguous()
    assert {one.dtype for one in moved} == {torch.float64}
    assert to_device(image, device=CPU, dtype=None).is_contiguous()


def test_a_batch_of_a_gpu_is_copied_to_the_cpu_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device stands for the GPU, from which there is nothing to copy."""
    copies: list[Any] = []
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *given, **options: copies.append((*given, options)) or self)
    for device in ("cpu", "meta"):
        to_device([torch.zeros(2, device="meta")], device=torch.device(device), dtype=None)
    assert [(copy[0].type, copy[-1]["non_blocking"]) for copy in copies] == [("cpu", False), ("meta", True)]


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
    contain, read = CONTAINERS[kind]
    sequences = pack_sequence([torch.ones(3), torch.ones(2)])
    batch = contain([torch.ones(1, dtype=torch.int32), (Graph(), sequences), Frozen(torch.ones(1)), "a text"])
    moved = to_device(batch, device=META, dtype=torch.float64)

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
    (moved,) = to_device([InPlace()], device=META, dtype=None)
    assert moved.device == "meta"


# channels_last


def image_sections(layout: str, *, precision: str = "fp64") -> dict[str, Any]:
    return {
        "model": {"_target_": "pipeline.models.resnet18", "num_classes": 10, "in_channels": 1, "width": 2},
        "data": {"_target_": "toys.images"},
        "loss": {"_target_": "torch.nn.CrossEntropyLoss"},
        "train": {"epochs": 1, "global_batch_size": 32, "memory_format": layout, "precision": precision},
    }


def test_both_layouts_train_the_same() -> None:
    """In fp64, where nothing but the order of sums differs; evaluation included."""
    plain, turned = (toys.trained(**image_sections(layout))[1] for layout in ("contiguous", "channels_last"))
    for name, steps in (("train/loss", 3), ("validation/loss", 1)):
        assert plain.series(name) == pytest.approx(turned.series(name), rel=1e-6)
        assert len(plain.series(name)) == steps


def test_weights_and_batches_lie_as_asked() -> None:
    s = toys.built(**image_sections("channels_last", precision="fp32"))
    seen: list[Any] = []
    s.model.conv1.register_forward_hook(lambda module, given, out: seen.append(out))  # type: ignore[union-attr, operator]
    batch = s.batches.place([torch.zeros(2, 3, 5, 5)[:, :1].expand(2, 1, 5, 5).contiguous(), torch.zeros(2)])
    s.model(batch[0])
    for one in (*seen, s.model.layer1[0].conv1.weight):  # type: ignore[index, union-attr]
        assert one.is_contiguous(memory_format=torch.channels_last)
        assert not one.is_contiguous()


# One ahead

GPU = torch.device("cuda", 0)


def pairs(count: int, *, seen: list[str], broken: int | None = None) -> Iterator[Pair]:
    """Batches that are their numbers."""
    for number in range(count):
        if number == broken:
            raise LookupError(f"batch {number}")
        seen.append(f"read {number}")
        yield part(number), number


def copying(seen: list[str]) -> Callable[[Any], Callable[[], Any]]:
    def copy(batch: Any) -> Callable[[], Any]:
        seen.append(f"copy {batch}")
        return lambda: seen.append(f"take {batch}") or batch

    return copy


def test_the_next_batch_is_on_its_way_while_one_is_computed() -> None:
    seen: list[str] = []
    begun = []
    for taken, batch in copy_one_ahead(pairs(4, seen=seen), copy=copying(seen)):
        assert taken.indices == [batch]
        begun.append([line for line in seen if line.startswith("copy")][-1])
    # The first step of a training doesn't wait for a second batch.
    assert begun == ["copy 0", "copy 2", "copy 3", "copy 3"]
    assert [line for line in seen if line.startswith("take")] == [f"take {number}" for number in range(4)]


@pytest.mark.parametrize("broken", [None, *range(4)])
def test_what_comes_before_an_unreadable_batch_is_trained(broken: int | None) -> None:
    """And a batch that isn't needed is no error."""
    seen: list[str] = []
    ahead = copy_one_ahead(pairs(4, seen=seen, broken=broken), copy=copying(seen))
    whole = 4 if broken is None else broken
    assert [next(ahead)[1] for _ in range(whole)] == list(range(whole))
    with pytest.raises(StopIteration if broken is None else LookupError):
        next(ahead)


@dataclass(frozen=True)
class Contained:
    inputs: torch.Tensor


class Unrecorded:
    """A batch that moves itself, and cannot note which stream uses its memory."""

    def to(self, device: torch.device) -> "Unrecorded":
        return self


@pytest.mark.parametrize("without_record", [Unrecorded(), torch.eye(2).to_sparse()])
def test_memory_of_a_copy_is_kept_while_it_is_used(without_record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator learns of each tensor, wherever it is; later copies wait for an object that cannot note it."""

    def record_stream(self: torch.Tensor, _: object) -> None:
        if self.is_sparse:
            raise NotImplementedError
        seen.append(self.tolist())

    seen: list[Any] = []
    stream = SimpleNamespace(
        record_event=lambda: None, wait_event=lambda _: None, wait_stream=lambda _: seen.append("wait")
    )
    monkeypatch.setattr(loader, "_stream_for_copies", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
    whole = Contained(torch.ones(1))
    held = [(part(0), [one]) for one in (whole, without_record, whole, whole)]
    copies = prefetch(iter(held), place=lambda batch: batch, device=GPU)

    assert [batch for _, (batch,) in copies] == [batch for _, (batch,) in held]
    assert seen == [[1.0], "wait", [1.0], [1.0]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_a_gpu_gets_the_same_batches() -> None:
    """Many and large enough that a copy which is used too early, or overwritten too early, shows."""
    held = ((part(number), torch.full((1 << 20,), float(number)).pin_memory()) for number in range(50))
    busy = torch.ones(2048, 2048, device=GPU)
    sums = []
    for _, batch in prefetch(held, place=lambda batch: batch.to(GPU, non_blocking=True), device=GPU):
        busy = busy @ busy / 2048
        sums.append(batch.double().mean())
    assert torch.stack(sums).tolist() == list(range(50))


def test_training_is_the_same_one_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    def losses() -> list[float]:
        return toys.trained(train={"gradient_accumulation": 3})[1].series("train/loss")

    expected = losses()
    monkeypatch.setattr(batches, "prefetch", lambda pairs, **_: copy_one_ahead(pairs, copy=lambda batch: lambda: batch))
    assert losses() == expected

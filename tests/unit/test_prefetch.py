"""Batches one ahead: which are read and copied when, and what comes of a batch that can't be read."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toys
from loading import part

from pipeline.train import batches, loader
from pipeline.train.loader import Pair, copy_one_ahead, prefetch

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

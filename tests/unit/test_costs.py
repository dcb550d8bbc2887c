"""What a prediction needs of a step."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import toys
from torch import nn

from pipeline.protocol.trial import CellMeasurement, Rank
from pipeline.train.costs import LARGEST_AT_LEAST, SMALLEST_BYTES, all_reduces, costs, gradients
from pipeline.train.state import State

SLEEP_S = 0.002


class SlowData(toys.Plain):
    """Each sample takes a while to load."""

    def __getitem__(self, index: int) -> Any:
        threading.Event().wait(SLEEP_S)
        return super().__getitem__(index)


def slow_data() -> tuple[SlowData, None]:
    return SlowData([(torch.ones(3), torch.ones(1))] * 16), None


def built(**sections: Any) -> State:
    return toys.built(max_steps=2, kind=CellMeasurement, **sections)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.train.costs.BUDGET_SECONDS", 0.2)


def test_costs_are_measured_on_request() -> None:
    assert toys.trained(max_steps=2)[0].costs is None
    probed = toys.trained(max_steps=2, measures_costs=True)[0].costs
    assert probed is not None
    assert all(cost.forward_ms > 0 and cost.backward_ms > 0 and cost.data_ms > 0 for cost in probed.curve)
    assert (probed.world_size, probed.all_reduces, probed.buffer_bytes) == (1, (), 0)


@pytest.mark.parametrize(
    ("sections", "sizes"),
    [
        ({}, [1, 4, 8]),
        ({"train": {"gradient_accumulation": 2}}, [1, 2, 4]),
        ({"model": {"_target_": "toys.batch_norm_net"}}, [2, 4, 8]),  # never a single sample
    ],
    ids=["batches", "micro-batches", "batch norm"],
)
def test_several_sizes_are_measured(sections: dict[str, Any], sizes: list[int]) -> None:
    found = costs(built(**sections))
    assert [cost.samples for cost in found.curve] == sizes
    # Mean and variance in fp64, and a counter
    assert found.buffer_bytes == (2 * 4 * 8 + 8 if "model" in sections else 0)


def test_loading_is_measured_for_each_size() -> None:
    curve = costs(built(data={"_target_": "test_costs.slow_data"})).curve
    assert curve[-1].samples == 8
    for cost in curve:  # never less than it sleeps
        assert cost.data_ms >= 1000 * cost.samples * SLEEP_S * 0.99


def test_batches_are_copied_before_the_clock_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in training, where a GPU copies a batch during the step before."""
    s = built(train={"precision": "fp32"})
    told: list[str] = []
    read, place = s.batches.read, s.batches.place
    monkeypatch.setattr(s.batches, "read", lambda indices: told.append("read") or read(indices))
    monkeypatch.setattr(s.batches, "place", lambda batch: told.append("placed") or place(batch))
    monkeypatch.setattr("pipeline.train.costs.synchronize", lambda _: told.append("clock"))
    costs(s)
    assert told[:6] == ["read", "clock", "placed", "clock", "clock", "clock"]


def test_backward_is_spread_evenly_over_matrices() -> None:
    found = gradients(nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 1)))
    assert [gradient.bytes for gradient in found] == [4, 5 * 4, 5 * 4, 5 * 4, 5 * 4, 15 * 4]  # the last layer first
    assert [gradient.ready for gradient in found] == [0.0, 0.5, 0.5, 0.5, 0.5, 1.0]
    assert [gradient.ready for gradient in gradients(nn.LayerNorm(5))] == [1.0, 1.0]  # vectors alone: at the end


def test_all_reduces_between_ranks(tmp_path: Path) -> None:
    # A group of one says nothing about time, but which sizes are measured; journeys/test_comparison.py has two workers.
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        found = all_reduces(built().trainee, rank=Rank(), device=torch.device("cpu"))
    finally:
        dist.destroy_process_group()
    sizes = [one.bytes for one in found]
    assert (sizes[0], sizes[-1]) == (SMALLEST_BYTES, LARGEST_AT_LEAST)
    assert sizes == sorted(sizes)
    assert all(one.ms > 0 for one in found)

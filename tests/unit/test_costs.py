"""What a prediction needs of a step."""

import threading

import pytest
import torch
import torch.distributed as dist
import toys
from torch import nn

from pipeline.errors import ExperimentError
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import CellMeasurement
from pipeline.training.build import build
from pipeline.training.loop import train
from pipeline.training.measuring.costs import LARGEST_AT_LEAST, SMALLEST_BYTES, all_reduces, costs, gradients

SLEEP_S = 0.02


class SlowData(toys.Plain):
    """Each sample takes a while to load."""

    def __getitem__(self, index):
        threading.Event().wait(SLEEP_S / 10)
        return super().__getitem__(index)


def slow_data():
    return SlowData([(torch.ones(3), torch.ones(1))] * 16), None


def setup_of(**sections):
    trial = toys.trial(max_steps=2, kind=CellMeasurement, **sections)
    allowed = (*trial.allowed, "test_costs")
    return build(trial.model_copy(update={"allowed": allowed}), rank=Rank())


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("pipeline.training.measuring.costs.BUDGET_SECONDS", 0.2)


def test_costs_are_measured_on_request():
    trial = toys.trial(max_steps=2)
    assert train(trial, rank=Rank(), outbox=toys.Kept()).costs is None
    probed = train(trial.model_copy(update={"measures_costs": True}), rank=Rank(), outbox=toys.Kept()).costs
    assert probed is not None
    assert [cost.samples for cost in probed.curve] == [1, 4, 8]
    assert all(cost.forward_ms > 0 and cost.backward_ms > 0 and cost.data_ms > 0 for cost in probed.curve)
    assert probed.world_size == 1
    assert probed.all_reduces == ()


def test_micro_batches_are_measured():
    found = costs(setup_of(train={"gradient_accumulation": 2}))
    assert [cost.samples for cost in found.curve] == [1, 2, 4]


def test_loading_is_measured_for_each_size():
    curve = costs(setup_of(data={"_target_": "test_costs.slow_data"})).curve
    assert curve[-1].samples == 8
    for cost in curve:  # never less than it sleeps
        assert cost.data_ms >= cost.samples * SLEEP_S * 100 * 0.99


def test_batches_are_copied_before_the_clock_starts(monkeypatch):
    """As in training, where a GPU copies a batch during the step before."""
    context = setup_of(train={"precision": "fp32"})
    copied, placed = [], []
    monkeypatch.setattr(context.batches, "copy_to_device", lambda batch: copied.append(batch) or batch)
    monkeypatch.setattr(context.batches, "placed", lambda batch: placed.append(batch) or batch)
    costs(context)
    assert {id(batch) for batch in placed} == {id(batch) for batch in copied}


def test_the_model_stays_as_it_is():
    context = setup_of(
        model={"_target_": "toys.batch_norm_net"},
        scheduler={"_target_": "torch.optim.lr_scheduler.ExponentialLR", "gamma": 0.5},
    )
    before = {name: value.clone() for name, value in context.model.state_dict().items()}
    features = context.features
    found = costs(context)
    assert all(torch.equal(before[name], value) for name, value in context.model.state_dict().items())
    assert all(parameter.grad is None for parameter in context.model.parameters())
    assert [group["lr"] for group in context.optimizer.param_groups] == [0.05]
    assert context.features is features
    assert found.buffer_bytes == 2 * 4 * 8 + 8  # mean and variance in fp64, and a counter


def test_batch_norm_is_never_given_a_single_sample():
    found = costs(setup_of(model={"_target_": "toys.batch_norm_net"}))
    assert [cost.samples for cost in found.curve] == [2, 4, 8]


def test_a_dataset_smaller_than_the_batch_is_refused():
    with pytest.raises(ExperimentError, match="22 samples, fewer than the global batch of 23"):
        costs(setup_of(train={"global_batch_size": 23}))


def test_backward_is_spread_evenly_over_matrices():
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 1))
    found = gradients(model)
    assert [gradient.bytes for gradient in found] == [4, 5 * 4, 5 * 4, 5 * 4, 5 * 4, 15 * 4]  # the last layer first
    assert [gradient.ready for gradient in found] == [0.0, 0.5, 0.5, 0.5, 0.5, 1.0]


def test_gradients_of_vectors_alone_are_ready_at_the_end():
    assert [gradient.ready for gradient in gradients(nn.LayerNorm(5))] == [1.0, 1.0]


def test_all_reduces_between_ranks(tmp_path):
    # A group of one says nothing about time, but which sizes are measured; journeys/test_prediction.py has two workers.
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        found = all_reduces(setup_of().model, rank=Rank(), device=torch.device("cpu"))
    finally:
        dist.destroy_process_group()
    assert [one.bytes for one in found][:1] == [SMALLEST_BYTES]
    assert [one.bytes for one in found][-1:] == [LARGEST_AT_LEAST]
    assert [one.bytes for one in found] == sorted(one.bytes for one in found)
    assert all(one.ms > 0 for one in found)

"""How fsdp cuts a model, what it refuses, and how it keeps ranks in step. Training with it: tests/integration."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pipeline.errors import ExperimentError
from pipeline.models import GPT, MLP
from pipeline.strategies import fsdp
from pipeline.strategies._fsdp_groups import choose, describe
from pipeline.training.batches.order import SampleOrder, padded, padded_evaluation


class Tied(nn.Module):
    """The last block's weight is the first one's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.blocks[2].weight = self.blocks[0].weight


class Scaled(nn.Module):
    def __init__(self, scale: torch.Tensor) -> None:
        super().__init__()
        self.scale = nn.Parameter(scale)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.exact = nn.Linear(2, 2, dtype=torch.float64)
        self.rough = nn.Linear(2, 2)


def gpt() -> GPT:
    return GPT(16, context_length=8, width=8, depth=3, heads=2)


def twice() -> nn.Module:
    """The same module in two places."""
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(4, 4))


class TestGroups:
    @pytest.mark.parametrize(
        ("model", "wanted", "names"),
        [
            (gpt(), "auto", ["blocks.0", "blocks.1", "blocks.2"]),
            (gpt(), "none", []),
            (gpt(), "_Attention", ["blocks.0.attention", "blocks.1.attention", "blocks.2.attention"]),
            (gpt(), ("_Block", "Embedding"), ["token", "position", "blocks.0", "blocks.1", "blocks.2"]),
            (MLP(4, hidden=[8], num_classes=3), "auto", 2),
            (nn.Linear(3, 3), "auto", []),
            (nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.LayerNorm(2)}), "auto", ["a", "b"]),
            (twice(), "auto", ["0", "3"]),
        ],
    )
    def test_are_chosen(self, model: nn.Module, wanted: Any, names: Any) -> None:
        chosen = choose(model, wanted)

        assert (list(chosen) if isinstance(names, list) else len(chosen)) == names

    def test_are_described(self) -> None:
        assert describe(choose(gpt(), ("_Block", "Embedding"))) == "2 x Embedding, 3 x _Block and all other parameters"
        assert describe({}) == "all parameters in one group"

    @pytest.mark.parametrize(
        ("model", "wanted", "message"),
        [
            (
                gpt(),
                "Block",
                r"the model has no module of class Block; it has Embedding, Dropout, Sequential, _Block",
            ),
            (Tied(), "ModuleList", "ModuleList is a container without a forward"),
            (
                Tied(),
                "auto",
                r"blocks.0.weight and blocks.2.weight are one shared parameter, in the group blocks.0 and in",
            ),
            (Scaled(torch.ones(())), "auto", r"scale is a scalar, which can't be sharded; give it the shape \(1,\)"),
            (Scaled(torch.ones(2, 3).T), "auto", "scale is not contiguous"),
            (Mixed(), "auto", "parameters in the group of all other parameters are torch.float32 and torch.float64"),
        ],
    )
    def test_that_cannot_be_are_refused(self, model: nn.Module, wanted: str, message: str) -> None:
        with pytest.raises(ExperimentError, match=message):
            choose(model, wanted)

    def test_may_share_a_parameter_inside(self) -> None:
        assert choose(Tied(), "none") == {}


def test_offload_is_refused_on_cpu() -> None:
    options = fsdp.Options(cpu_offload=True)

    assert "remove it" in str(fsdp.Strategy.refuse(options, device="cpu"))
    assert fsdp.Strategy.refuse(options, device="cuda") is None


class TestPadding:
    @given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 5), st.integers(1, 4), st.data())
    def test_ranks_make_as_many_passes_in_each_step(
        self, samples: int, batch: int, world_size: int, accumulation: int, data: st.DataObject
    ) -> None:
        order = SampleOrder(samples=samples, global_batch_size=batch, seed=1)
        first = data.draw(st.integers(0, order.steps_per_epoch - 1))
        split: dict[str, int] = {"world_size": world_size, "accumulation": accumulation, "first": first}
        passes = []
        for rank in range(world_size):
            own = list(order.micro_batches(0, rank=rank, **split))
            together = list(padded(own, order=order, **split))
            passes.append([micro_batch.is_last for micro_batch in together])
            assert [micro_batch for micro_batch in together if micro_batch.weight] == [
                micro_batch for micro_batch in own if micro_batch.weight
            ]
            assert rank or together == own  # rank 0 has the most, and its buffers are everyone's

        assert all(one == passes[0] for one in passes)

    @given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 8))
    def test_ranks_make_as_many_passes_in_evaluation(self, samples: int, world_size: int, batch_size: int) -> None:
        order = SampleOrder(samples=samples, global_batch_size=world_size * batch_size, seed=0)
        own = [
            list(order.evaluation_micro_batches(samples, rank=rank, world_size=world_size))
            for rank in range(world_size)
        ]
        together = [list(padded_evaluation(micro_batches, own[0])) for micro_batches in own]

        assert {len(micro_batches) for micro_batches in together} == {len(own[0])}
        assert [
            [micro_batch for micro_batch in micro_batches if micro_batch.weight] for micro_batches in together
        ] == own


def test_an_option_that_this_torch_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    options = fsdp.Options(zero_unused_gradients=True)

    monkeypatch.setattr(fsdp, "_SETS_ZEROS", True)
    assert fsdp.Strategy.refuse(options, device="cpu") is None
    monkeypatch.setattr(fsdp, "_SETS_ZEROS", False)
    refusal = fsdp.Strategy.refuse(options, device="cpu")
    assert (
        refusal == f"zero_unused_gradients needs torch 2.13, but {torch.__version__} is installed; upgrade or remove it"
    )
    assert fsdp.Strategy.refuse(fsdp.Options(), device="cpu") is None

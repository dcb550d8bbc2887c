"""Images and convolutions in channels_last: the same training, in another layout."""

from pathlib import Path
from typing import Any

import pytest
import samples
import torch
import toys
from torch.nn.utils.rnn import pack_sequence

from pipeline.config.load import load
from pipeline.errors import ExperimentError
from pipeline.protocol.trial import Rank
from pipeline.training import loop
from pipeline.training.build import build
from pipeline.training.loader import to_device

NETWORK: dict[str, Any] = {
    "model": {"_target_": "pipeline.models.resnet18", "num_classes": 10, "in_channels": 1, "width": 2},
    "data": {"_target_": "toys.images"},
    "loss": {"_target_": "torch.nn.CrossEntropyLoss"},
}
RESNET = Path(__file__).parents[2] / "experiments" / "resnet.yaml"


def sections(layout: str, *, precision: str = "fp64") -> dict[str, Any]:
    train = {"epochs": 1, "global_batch_size": 32, "memory_format": layout, "precision": precision}
    return {**NETWORK, "train": train}


def test_both_layouts_train_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp64, where nothing but the order of sums differs; evaluation included."""
    monkeypatch.setattr(loop, "probe", lambda context, **_: samples.parts(step_ms=5.0))
    results = [toys.trained(**sections(layout)) for layout in ("contiguous", "channels_last")]
    (one, plain), (other, turned) = results

    losses, turned_losses = plain.series("train/loss"), turned.series("train/loss")
    assert len(losses) == len(turned_losses) == 3
    assert losses == pytest.approx(turned_losses, rel=1e-6)
    assert one.metrics["validation/loss"] == pytest.approx(other.metrics["validation/loss"], rel=1e-6)


def test_weights_and_batches_lie_as_asked() -> None:
    context = build(toys.trial(**sections("channels_last", precision="fp32")), rank=Rank())
    seen = []
    context.model.conv1.register_forward_hook(lambda module, given, out: seen.append((given[0], out)))  # type: ignore[union-attr, operator]
    batch = context.batches.placed([torch.zeros(2, 3, 5, 5)[:, :1].expand(2, 1, 5, 5).contiguous(), torch.zeros(2)])
    context.model(batch[0])

    ((_, out),) = seen
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert not out.is_contiguous()
    weight = context.model.layer1[0].conv1.weight  # type: ignore[index, union-attr]
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


def test_objects_that_can_move_are_moved_as_a_whole() -> None:
    """The device meta stands for a GPU."""
    sequences = pack_sequence([torch.ones(3), torch.ones(2)])
    batch = {"graph": Graph(), "words": sequences, "number": 3}
    moved = to_device(batch, device=torch.device("meta"), dtype=torch.float64)
    assert moved["graph"].device == "meta"
    assert moved["words"].data.device.type == "meta"
    assert moved["words"].data.dtype == torch.float64
    assert moved["words"].batch_sizes.device.type == "cpu"  # where torch needs it
    assert moved["number"] == 3


def test_fsdp_refuses_it_with_the_line() -> None:
    with pytest.raises(ExperimentError) as caught:
        load(RESNET, ["train.memory_format=channels_last", "parallel.strategy=fsdp"])
    (problem,) = caught.value.problems
    assert problem.key == "parallel.strategy"
    assert "train.memory_format: contiguous" in problem.message

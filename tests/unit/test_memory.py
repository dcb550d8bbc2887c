"""Memory of GPUs, with a stand-in of torch's allocator: what trials leave to each other."""

# promise: dp on several GPUs, a rank's own GPU, memory for the baseline (stand-ins of GPUs)

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import toys
from torch import nn

from pipeline.protocol.rank import Rank
from pipeline.training import build as building
from pipeline.training.measuring.memory import check_free_memory, find_passing_bytes, free_training

GPU = torch.device("cuda", 0)


def test_each_trial_of_a_process_counts_its_peak_memory_from_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def noted(text: str, function: Callable[..., Any] = lambda *_, **__: None) -> Callable[..., Any]:
        return lambda *given, **more: (told.append(text.format(*given)), function(*given, **more))[1]

    forget = building.forget_memory
    monkeypatch.setattr(building, "forget_memory", lambda _: forget(GPU))
    monkeypatch.setattr(building, "_build_model", noted("built", building._build_model))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "empty_cache", noted("emptied"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", noted("reset {}"))
    for _ in range(2):
        building.build(toys.trial(), rank=Rank())
    assert told == ["emptied", "reset 0", "reset 1", "built"] * 2


@pytest.mark.parametrize(("free", "fraction"), [(10, 1.0), (25, 0.85)], ids=["of the GPU", "of the process's share"])
def test_a_gpu_has_room_for_the_next_step_or_not(monkeypatch: pytest.MonkeyPatch, free: int, fraction: float) -> None:
    """10 bytes are free, and 5 are cached; a step has taken 20 in addition to 70."""
    sizes: dict[str, Any] = {"max_memory_allocated": 90, "memory_allocated": 70, "memory_reserved": 75}
    sizes |= {"mem_get_info": (free, 100), "get_per_process_memory_fraction": fraction}
    for name, value in sizes.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    assert find_passing_bytes(GPU) == 20
    check_free_memory(GPU, needed=15)
    with pytest.raises(torch.OutOfMemoryError, match="the next training step needs"):
        check_free_memory(GPU, needed=16)


def test_a_training_that_is_freed_holds_no_memory() -> None:
    optimizer = {"_target_": "torch.optim.AdamW", "lr": 0.01}
    context = building.build(
        toys.trial(model={"_target_": "toys.batch_norm_net"}, optimizer=optimizer, train={"ema": {"decay": 0.9}}),
        rank=Rank(),
    )
    for parameter in context.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    context.optimizer.step()
    model, context.built = context.model, context.built._replace(wrapped=nn.Sequential(context.model))
    free_training(context)
    assert [*model.parameters(), *model.buffers()]
    assert not any(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not context.optimizer.state
    assert not context.features
    assert context.wrapped is model


def test_a_training_that_is_freed_leaves_tensors_that_user_code_may_share() -> None:
    train = {"freeze": ["0.*"]}
    context = building.build(toys.trial(model={"_target_": "toys.batch_norm_net"}, train=train), rank=Rank())
    model = context.model
    shared = [*model.buffers(), *(weights for weights in model.parameters() if not weights.requires_grad)]
    sizes = [tensor.numel() for tensor in shared]
    dying = weakref.ref(shared[-1])
    free_training(context)
    assert [tensor.numel() for tensor in shared] == sizes
    assert not any(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    del shared
    gc.collect()
    assert dying() is None

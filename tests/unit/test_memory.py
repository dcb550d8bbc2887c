"""Memory of GPUs, with a stand-in of torch's allocator: what trials leave to each other."""

# promise: dp on several GPUs, a rank's own GPU, memory for the baseline (stand-ins of GPUs)

import gc
import weakref
from typing import Any

import pytest
import torch
import toys
from torch import nn

from pipeline.protocol.rank import Rank
from pipeline.train import build as building
from pipeline.train.state import State
from pipeline.train.turns import check_free_memory, free_training

GPU = torch.device("cuda", 0)


def test_each_trial_of_a_process_counts_its_peak_memory_from_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    forget, seeded = building.forget_memory, building.seeded_model
    monkeypatch.setattr(building, "forget_memory", lambda _: forget(GPU))
    monkeypatch.setattr(building, "seeded_model", lambda *given: (told.append("built"), seeded(*given))[1])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: told.append("emptied"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda index: told.append(f"reset {index}"))
    for _ in range(2):
        building.build(toys.trial(), rank=Rank())
    assert told == ["emptied", "reset 0", "reset 1", "built"] * 2


@pytest.mark.parametrize(("free", "fraction"), [(10, 1.0), (25, 0.85)], ids=["of the GPU", "of the process's share"])
def test_a_gpu_has_room_for_the_next_step_or_not(monkeypatch: pytest.MonkeyPatch, free: int, fraction: float) -> None:
    """10 bytes are free, and 5 are cached."""
    sizes: dict[str, Any] = {"memory_allocated": 70, "memory_reserved": 75, "mem_get_info": (free, 100)}
    for name, value in (sizes | {"get_per_process_memory_fraction": fraction}).items():
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    check_free_memory(GPU, needed=15)
    with pytest.raises(torch.OutOfMemoryError, match="the next training step needs"):
        check_free_memory(GPU, needed=16)


def built(**train: Any) -> State:
    optimizer = {"_target_": "torch.optim.AdamW", "lr": 0.01}
    trial = toys.trial(model={"_target_": "toys.batch_norm_net"}, optimizer=optimizer, train=train)
    return building.build(trial, rank=Rank(), outbox=toys.Kept())


def test_a_training_that_is_freed_holds_no_memory() -> None:
    s = built(ema={"decay": 0.9})
    for parameter in s.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    s.optimizers[""].step()
    s.wrapped = nn.Sequential(s.trainee)
    free_training(s)
    assert [*s.trainee.parameters(), *s.trainee.buffers()]
    assert not any(tensor.numel() for tensor in (*s.trainee.parameters(), *s.trainee.buffers()))
    assert all(parameter.grad is None for parameter in s.model.parameters())
    assert not s.optimizers[""].state
    assert (s.hooks, s.wrapped) == ((), s.trainee)


def test_a_training_that_is_freed_leaves_tensors_that_user_code_may_share() -> None:
    s = built(freeze=["0.*"])
    shared = [*s.model.buffers(), *(weights for weights in s.model.parameters() if not weights.requires_grad)]
    sizes = [tensor.numel() for tensor in shared]
    dying = weakref.ref(shared[-1])
    free_training(s)
    assert [tensor.numel() for tensor in shared] == sizes
    assert not any(tensor.numel() for tensor in (*s.model.parameters(), *s.model.buffers()))
    del shared
    gc.collect()
    assert dying() is None

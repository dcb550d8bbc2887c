"""The end of a process group: DDP's reducer is freed before the group, whose threads it would join under the GIL."""

# promise: a rank ends at once after its training; no collection of garbage waits for threads of its process group

import gc
import weakref
from typing import Any

import pytest
import torch.distributed as dist
import toys
from torch.nn.parallel import DistributedDataParallel

from pipeline import worker as main
from pipeline.protocol.trial import Rank


def test_ddp_is_gone_when_its_group_is_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Any]] = []
    alive: list[bool] = []
    wrap, destroy = DistributedDataParallel.__init__, dist.destroy_process_group

    def noted(self: Any, *given: Any, **more: Any) -> None:
        made.append(weakref.ref(self))
        wrap(self, *given, **more)

    def observed() -> None:
        alive.extend(one() is not None for one in made)
        destroy()

    monkeypatch.setattr(DistributedDataParallel, "__init__", noted)
    monkeypatch.setattr(dist, "destroy_process_group", observed)
    gc.disable()
    try:
        main.run(toys.trial(strategy="ddp"), rank=Rank(), outbox=toys.Kept())
    finally:
        gc.enable()
    assert alive == [False]

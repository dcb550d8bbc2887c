"""NVTX without a GPU: what a training marks, as text."""

from typing import Any

import toys
from torch.cuda import nvtx

from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import Trial
from pipeline.training.loop import train


class Ranges:
    """Stands in for torch's functions; ``told`` has each range with those around it, e.g. "step 1 > forward"."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.open: list[str] = []
        self.across_threads: list[int] = []

    def mark(self, _: str) -> None:
        """Do nothing, as NVTX does where nobody profiles."""

    def range_push(self, name: str) -> None:
        self.open.append(name)
        self.told.append(" > ".join(self.open))

    def range_pop(self) -> None:
        self.open.pop()

    def range_start(self, name: str) -> int:
        self.told.append(" > ".join([*self.open, f"({name})"]))
        self.across_threads.append(len(self.told))
        return len(self.told)

    def range_end(self, handle: int) -> None:
        self.across_threads.remove(handle)


def ranges_of(trial: Trial, monkeypatch: Any, *, rank: Rank | None = None) -> tuple[Ranges, toys.Kept]:
    """Train, and return the ranges and the events."""
    ranges, outbox = Ranges(), toys.Kept()
    for name in ("mark", "range_push", "range_pop", "range_start", "range_end"):
        monkeypatch.setattr(nvtx, name, getattr(ranges, name))
    train(trial, rank=rank or Rank(), outbox=outbox)
    assert not ranges.open
    assert not ranges.across_threads
    return ranges, outbox

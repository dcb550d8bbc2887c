"""Operations of a step on two ranks: those of one process; a rank that can't count them is named."""

import sys
from pathlib import Path

import torch
import toys
from ranks import on_ranks
from torch import Tensor, nn

from pipeline.protocol.events import Warned
from pipeline.protocol.trial import Rank
from pipeline.protocol.trial_result import Flops
from pipeline.training.build import build
from pipeline.training.collectives import barrier
from pipeline.training.dry_run import held_step
from pipeline.training.flops import count

CASES = [("ddp", {}), ("ddp", {"find_unused_parameters": True}), ("fsdp", {})]


class FailsOnOneRank(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        if torch.distributed.get_rank() == 1:
            raise MemoryError("no room on this rank")
        return super().forward(inputs)


def _count(rank: Rank) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    for strategy, options in CASES:
        trial = toys.trial().model_copy(update={"strategy": strategy, "workers": 2, "options": options})
        outbox = toys.Kept()
        context = build(trial, rank=rank)
        assert count(context, held_step(context), outbox=outbox) == Flops(of_sample={"fp64": 12.0}), (strategy, options)
        assert outbox.events == []

    trial = toys.trial(model={"_target_": "test_device_ranks.FailsOnOneRank"})
    trial = trial.model_copy(update={"strategy": "ddp", "workers": 2, "allowed": (*trial.allowed, "test_device_ranks")})
    outbox = toys.Kept()
    context = build(trial, rank=rank)
    assert count(context, held_step(context), outbox=outbox) is None
    said = [event.message for event in outbox.events if isinstance(event, Warned)]
    expected = "could not count the FLOPs of a step on rank 1, so none are reported: no room on this rank"
    assert said == ([expected] if rank.is_first else [])
    barrier(rank)


def test_ranks_count_what_one_process_counts(tmp_path: Path) -> None:
    on_ranks(_count, folder=tmp_path)

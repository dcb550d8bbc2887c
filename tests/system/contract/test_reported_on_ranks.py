"""What two ranks report: at the same steps, operations, and the trace of one of them."""

# promise: operations of a step, counted by hand too; MFU, utilization, energy (fake NVML), price

import gzip
import json
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from ranks import Ranks
from torch import Tensor, nn

from pipeline.protocol.channel import DirectOutbox
from pipeline.protocol.events import Warned
from pipeline.protocol.trial import Rank
from pipeline.protocol.trial_result import Flops
from pipeline.train import meter as meters
from pipeline.train.costs import count_operations
from pipeline.train.kept import held_step
from pipeline.train.measure import TRACED_STEPS
from pipeline.train.meter import Meter
from pipeline.train.ranks import barrier
from pipeline.train.run import train
from pipeline.train.state import Facts, Stepped

FACTS = Facts(draws=False, draws_others=False, items_per_sample=1.0, gathers=False, log_names=())
"""What the first step would have shown."""
COUNTED = [("ddp", {}), ("ddp", {"find_unused_parameters": True}), ("fsdp", {})]


def test_ranks_report_the_same_steps_however_long_each_of_them_takes(ranks: Ranks) -> None:
    quick, slow = ranks.call(_reports)
    assert quick == slow
    assert 2 < len(quick) < 50


def _reports(rank: Rank) -> list[int]:
    """Return the steps after which a rank reported, of which one is slower than the other."""
    data = {"_target_": "toys.regression", "samples": 400}  # 100 steps in an epoch
    s = toys.built(rank=rank, workers=2, data=data, train={"global_batch_size": 4, "log_every_steps": 1})
    s.facts = FACTS
    meter, reports = Meter(s), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meters, "REPORT_MS", 50.0)
        meter.resume()
        for step in range(1, 100):
            time.sleep(0.004 * rank.rank)  # nothing else makes ranks wait for each other
            s.step = step
            meter.add(Stepped({"loss": torch.zeros(())}, None, {}, {}))
            if meter.is_due(step):
                meter.flush()
                reports.append(step)
    return reports


# Operations of a step


class FailsOnOneRank(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 1)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as torch calls it
        if torch.distributed.get_rank() == 1:
            raise MemoryError("no room on this rank")
        return super().forward(input)


def test_ranks_count_what_one_process_counts(ranks: Ranks) -> None:
    for found in ranks.call(_counts):
        assert found == [(Flops(of_sample={"fp64": 12.0}), [])] * len(COUNTED)


def _counts(rank: Rank) -> list[tuple[Flops | None, list[str]]]:
    return [_count(rank, strategy=strategy, options=options) for strategy, options in COUNTED]


def test_a_rank_that_cannot_count_is_named(ranks: Ranks) -> None:
    message = "could not count the FLOPs of a step on rank 1, so none are reported: no room on this rank"
    assert ranks.call(_count_with_failure) == [(None, [message]), (None, [])]


def _count_with_failure(rank: Rank) -> tuple[Flops | None, list[str]]:
    return _count(rank, strategy="ddp", model={"_target_": "test_reported_on_ranks.FailsOnOneRank"})


def _count(rank: Rank, **wanted: Any) -> tuple[Flops | None, list[str]]:
    """Return the operations of a step, and what was said."""
    outbox = toys.Kept()
    s = toys.built(rank=rank, outbox=outbox, workers=2, **wanted)
    s.facts = FACTS
    counted = count_operations(s, held_step(s))
    barrier(rank)
    return counted, [event.message if isinstance(event, Warned) else event.kind for event in outbox.events]


def test_two_ranks_take_traced_steps_together_and_one_records_them(ranks: Ranks, tmp_path: Path) -> None:
    ranks.call(_trace, tmp_path)
    with gzip.open(tmp_path / "0" / "traces" / "main.json.gz") as file:
        names = Counter(event.get("name", "") for event in json.load(file)["traceEvents"])
    assert not (tmp_path / "1" / "traces").exists()
    assert names["DistributedDataParallel.forward"] == TRACED_STEPS
    assert sum(count for name, count in names.items() if re.search("all_?reduce", name)) >= TRACED_STEPS


def _trace(rank: Rank, folder: Path) -> None:
    trial = toys.trial(max_steps=4, profile=True, workers=2, strategy="ddp")
    own = folder / str(rank.rank)
    own.mkdir()
    train(trial, rank=rank, outbox=DirectOutbox(own, lambda _: None))

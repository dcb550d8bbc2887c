"""Ranks report together, however long each takes."""

import json
import time
from pathlib import Path

import pytest
import torch
import toys
from ranks import on_ranks

from pipeline.protocol.trial import Rank
from pipeline.training.build import build
from pipeline.training.clock import Clock
from pipeline.training.meter import Meter
from pipeline.training.step import StepResult

LONG = {"data": {"_target_": "toys.regression", "samples": 400}}
"""100 steps in an epoch."""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """After which steps each of two gloo processes reported, of which one is slower than the other."""
    folder = tmp_path_factory.mktemp("ranks")
    on_ranks(_report, folder, folder=folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def _report(rank: Rank, folder: Path) -> None:
    trial = toys.trial(**LONG, train={"global_batch_size": 4, "log_every_steps": 1})
    context = build(trial.model_copy(update={"workers": 2}), rank=rank)
    clock = Clock(device=context.device, warmup_steps=0)
    meter = Meter(context=context, clock=clock, outbox=toys.Kept())
    reports = []
    clock.resume()
    for step in range(1, 100):
        time.sleep(0.004 * rank.rank)  # nothing else makes ranks wait for each other
        meter.add(StepResult(torch.zeros(()), None, 0.1, False), samples=4)
        if meter.cadence.is_due(step):
            meter.flush(step=step, epoch=1)
            reports.append(step)
    (folder / f"{rank.rank}.json").write_text(json.dumps(reports))


def test_ranks_agree_however_long_each_of_them_takes(two_ranks: list[list[int]]) -> None:
    quick, slow = two_ranks

    assert quick == slow
    assert 2 < len(quick) < 50

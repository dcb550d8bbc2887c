"""Two ranks of which one is traced."""

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import toys
from ranks import on_ranks

from pipeline.launchers.base import DirectOutbox, Session
from pipeline.protocol.events import AnyEvent
from pipeline.protocol.trial import Rank, Trial
from pipeline.training.loop import train
from pipeline.training.probe import TRACED_STEPS

NAME = "traces/main.json.gz"


def trial(*, workers: int = 1) -> Trial:
    """A measurement with a trace; several workers train with ddp."""
    strategy = "ddp" if workers > 1 else "single"
    return toys.trial(max_steps=4).model_copy(update={"profile": True, "workers": workers, "strategy": strategy})


def events_of(folder: Path) -> list[dict[str, Any]]:
    """The events of the trace that arrived in the folder."""
    with gzip.open(folder / NAME) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def names_in(folder: Path) -> Counter[str]:
    return Counter(event["name"] for event in events_of(folder) if "name" in event)


def session(folder: Path, received: list[AnyEvent]) -> Session:
    return Session(folder=folder, receive=received.append, parallel=trial().experiment.parallel)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with two gloo processes."""
    folder = tmp_path_factory.mktemp("ranks")
    on_ranks(_train, folder, folder=folder)
    return folder


def _train(rank: Rank, folder: Path) -> None:
    own = folder / f"rank{rank.rank}"
    own.mkdir()
    train(trial(workers=2), rank=rank, outbox=DirectOutbox(session(own, [])))


def test_two_ranks_take_the_steps_together_and_one_records_them(two_ranks: Path) -> None:
    names = names_in(two_ranks / "rank0")

    assert not (two_ranks / "rank1" / "traces").exists()
    assert names["DistributedDataParallel.forward"] == TRACED_STEPS
    assert sum(count for name, count in names.items() if re.search("all_?reduce", name)) >= TRACED_STEPS

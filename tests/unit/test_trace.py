"""Traces of a few steps: one file that viewers can open, whatever the number of ranks."""

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from ranks import on_ranks

from pipeline.contract import Rank, Trial
from pipeline.events import AnyEvent, ArtifactSaved
from pipeline.launchers.base import DirectOutbox, Session
from pipeline.training.build import build
from pipeline.training.loop import train
from pipeline.training.trace import STEPS, record

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


def test_it_arrives_and_is_announced(tmp_path: Path) -> None:
    received: list[AnyEvent] = []
    result = train(trial(), rank=Rank(), outbox=DirectOutbox(session(tmp_path, received)))

    (saved,) = [event for event in received if isinstance(event, ArtifactSaved)]
    assert (saved.trial, saved.path) == ("main", NAME)
    assert received[-1] == saved  # after all that is measured
    assert result.parts.step_ms.windows >= 3


def test_it_shows_forward_backward_and_optimizer_of_each_step(tmp_path: Path) -> None:
    train(trial(), rank=Rank(), outbox=DirectOutbox(session(tmp_path, [])))

    names = names_in(tmp_path)
    assert names["aten::linear"] == STEPS
    assert names["autograd::engine::evaluate_function: AddmmBackward0"] == STEPS
    assert names["Optimizer.step#SGD.step"] == STEPS


def test_none_is_recorded_without_being_asked_for(tmp_path: Path) -> None:
    asked = trial().model_copy(update={"profile": False})
    train(asked, rank=Rank(), outbox=DirectOutbox(session(tmp_path, [])))

    assert list(tmp_path.iterdir()) == []


def test_the_model_stays_as_it_is(tmp_path: Path) -> None:
    asked = toys.trial(max_steps=4, model={"_target_": "toys.batch_norm_net"})
    ready = build(asked, rank=Rank())
    before = {name: value.clone() for name, value in ready.model.state_dict().items()}
    rate = ready.optimizer.param_groups[0]["lr"]
    record(ready, DirectOutbox(session(tmp_path, [])))

    assert all(torch.equal(value, before[name]) for name, value in ready.model.state_dict().items())
    assert ready.optimizer.param_groups[0]["lr"] == rate > 0


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
    assert names["DistributedDataParallel.forward"] == STEPS
    assert sum(count for name, count in names.items() if re.search("all_?reduce", name)) >= STEPS

"""Traces of a few steps: one file that viewers can open, whatever the number of ranks."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import toys

from pipeline.launchers.base import DirectOutbox, Session
from pipeline.protocol.events import AnyEvent, ArtifactSaved
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import Trial
from pipeline.training.build import build
from pipeline.training.loop import train
from pipeline.training.measuring.probe import TRACED_STEPS, record_trace

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
    assert result.parts.held_ms is not None
    assert result.parts.held_ms.windows >= 3


def test_it_shows_forward_backward_and_optimizer_of_each_step(tmp_path: Path) -> None:
    train(trial(), rank=Rank(), outbox=DirectOutbox(session(tmp_path, [])))

    names = names_in(tmp_path)
    assert names["aten::linear"] == TRACED_STEPS
    assert names["autograd::engine::evaluate_function: AddmmBackward0"] == TRACED_STEPS
    assert names["Optimizer.step#SGD.step"] == TRACED_STEPS


def test_none_is_recorded_without_being_asked_for(tmp_path: Path) -> None:
    asked = trial().model_copy(update={"profile": False})
    train(asked, rank=Rank(), outbox=DirectOutbox(session(tmp_path, [])))

    assert list(tmp_path.iterdir()) == []


def test_the_model_stays_as_it_is(tmp_path: Path) -> None:
    asked = toys.trial(max_steps=4, model={"_target_": "toys.batch_norm_net"})
    ready = build(asked, rank=Rank())
    before = {name: value.clone() for name, value in ready.model.state_dict().items()}
    rate = ready.optimizer.param_groups[0]["lr"]
    record_trace(ready, DirectOutbox(session(tmp_path, [])))

    assert all(torch.equal(value, before[name]) for name, value in ready.model.state_dict().items())
    assert ready.optimizer.param_groups[0]["lr"] == rate > 0

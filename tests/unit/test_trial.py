"""What driver and workers share survives JSON, and errors survive a process boundary."""

import pickle
from typing import Any, get_args
from unittest.mock import Mock

import pytest
import toys
from pydantic import ValidationError
from samples import finished, spread
from typer.core import TyperGroup

from pipeline import errors
from pipeline.cli import app
from pipeline.errors import ExperimentError, Interrupted, Problem, TrainingError
from pipeline.protocol import events
from pipeline.protocol.events import AnyEvent, Event, Failed, event_from_json, event_to_json
from pipeline.protocol.trial import (
    ROLES,
    Baseline,
    CellMeasurement,
    Measurement,
    Rank,
    Reference,
    Role,
    Training,
    Trial,
    trial_from_json,
)

EVENTS: list[AnyEvent] = [
    events.RunOpened(
        time=1.0, run="r", tracking_uri="u", tracking_experiment="e", tags={"a": "b"}, params={}, trials=("main",)
    ),
    events.TrialOpened(time=1.0, role="reference", title="1 process, 2 cores", tags={}, params={"lr": "0.1"}),
    events.Started(
        time=1.0, total_steps=1, steps_per_epoch=1, epochs=1, train_samples=1, epoch_samples=1,
        validation_samples=0, parameters=4,
        devices=("cpu",), data_name="d", data_digest="x",
    ),
    events.FirstStep(time=1.0),
    events.Metrics(time=1.0, step=2, epoch=1, points=(events.Point("train/loss", 2, float("inf")),)),
    events.SystemMetrics(time=1.0, node="n", points=(events.Point("system/cpu", 0, 1.5),)),
    events.Warned(time=1.0, message="two\nlines"),
    Failed(time=1.0, rank=Rank(rank=1, world_size=2), error="E", traceback="T", problems=(Problem("k", "m", "p:1"),)),
    events.Advanced(time=1.0, what="evaluating", done=2, total=3, unit="samples"),
    events.Heartbeat(
        time=1.0, rank=Rank(rank=1, world_size=2), pid=7, step=3, phase=events.Phase.BACKWARD,
        idle_s=0.1, stack="  File ...",
    ),
    events.Trained(time=1.0, result=finished("main", spread(2.0)).result),
    finished("main", spread(2.0), communication=1.5, metrics={"a": 1.0}),
    events.Evaluated(time=1.0, split="test", samples=9, step=3, epoch=1, checkpoint="c", values={"test/loss": 0.5}),
    events.ArtifactSaved(time=1.0, path="p"),
    events.ModelSaved(time=1.0, weights="w", example="e"),
    events.ModelExported(time=1.0, program="p", torch="2.13.0"),
    events.Tagged(time=1.0, run="r", tags={"stopped_early": "after epoch 1"}),
    events.CheckpointSaved(time=1.0, step=3, path="p/step-00000003", seconds=2.0),
    events.Resumed(time=1.0, step=3, epoch=1, checkpoint="p/step-00000003"),
    events.RunClosed(time=1.0, status="FAILED", message="m", summary="# s"),
]  # fmt: skip


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.kind)
def test_every_event_survives_json(event: AnyEvent) -> None:
    line = event_to_json(event)
    assert b"\n" not in line
    assert event_from_json(line) == event


def test_there_is_an_example_of_every_event() -> None:
    kinds = {kind.__name__ for kind in get_args(get_args(AnyEvent)[0])}
    assert {type(event).__name__ for event in EVENTS} == kinds
    assert kinds == {kind.__name__ for kind in Event.__subclasses__()}


@pytest.mark.parametrize("line", ["", "{}", '{"kind": "warned"}', '{"kind": "unheard_of", "time": 1}', '{"kind": "war'])
def test_half_an_event_is_none(line: str) -> None:
    with pytest.raises(ValidationError):
        event_from_json(line)


@pytest.mark.parametrize("role", ROLES)
def test_a_trial_of_each_role_survives_json(role: Role) -> None:
    sections = {
        "optimizer": {"_target_": "torch.optim.Adam", "lr": 1e-3, "betas": [0.9, 0.999]},
        "scheduler": {"_target_": "torch.optim.lr_scheduler.CosineAnnealingLR", "T_max": "${total_steps}"},
    }
    shared = {name: getattr(toys.trial(**sections), name) for name in Trial.model_fields if name != "role"}
    trial = ROLES[role](**shared)
    again = trial_from_json(trial.model_dump_json())
    assert again == trial
    assert (type(again), again.role) == (ROLES[role], role)


def test_a_role_has_its_own_fields_only() -> None:
    with pytest.raises(ValidationError):
        Training(**toys.trial().model_dump(), max_steps=2)


@pytest.mark.parametrize(
    "error",
    [
        ExperimentError([Problem("a", "wrong", "x.yaml:1"), Problem("b", "too")]),
        TrainingError("failed", "its traceback"),
        errors.UsageError("no such file"),
        errors.ResourceError("too small"),
    ],
)
def test_errors_survive_a_process_boundary(error: errors.PipelineError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), again.__dict__, again.exit_code) == (str(error), error.__dict__, error.exit_code)


def test_exit_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = (ExperimentError, errors.UsageError, errors.ResourceError, TrainingError, Interrupted)
    assert [kind.exit_code for kind in classes] == [2, 2, 3, 1, 130]
    monkeypatch.setattr(TyperGroup, "invoke", Mock(side_effect=errors.Terminated))
    with pytest.raises(Interrupted, match="SIGTERM") as ended:
        app(["list"])
    assert ended.value.exit_code == 143


def test_a_problem_is_place_key_message() -> None:
    assert str(Problem("train.epochs", "wrong", "x.yaml:3")) == "x.yaml:3: train.epochs: wrong"
    assert str(Problem("", "not a mapping")) == "not a mapping"
    assert str(ExperimentError([Problem("a", "1"), Problem("b", "2")])) == "a: 1\nb: 2"


@pytest.mark.parametrize(
    ("kind", "changed", "title"),
    [
        (Baseline, {}, "1 worker"),
        (CellMeasurement, {"strategy": "ddp", "workers": 3}, "ddp, 3 workers"),
        (Baseline, {"strategy": "dp", "devices_per_worker": 4, "device": "cuda"}, "dp, 4 GPUs"),
        (CellMeasurement, {"variant": "static_graph"}, "1 worker (static_graph)"),
        (Reference, {"cpus_per_worker": 6}, "1 process, 6 cores"),
    ],
)
def test_titles(kind: type[Measurement], changed: dict[str, Any], title: str) -> None:
    assert toys.trial(max_steps=2, kind=kind).model_copy(update=changed).title == title

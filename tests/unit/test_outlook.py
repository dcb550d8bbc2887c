"""The note on time, device hours and price of a training, from an earlier run of the same file."""

# promise: the plan estimates the whole training only from a completed run of the same file that was as fast

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from samples import finished, spread

from pipeline.commands.outlook import with_outlook
from pipeline.config.load import ExperimentFile, load
from pipeline.config.summary import flatten
from pipeline.planning.plan import Plan, make_plan
from pipeline.planning.resources import Resources
from pipeline.protocol.events import RunClosed, RunOpened, Started
from pipeline.protocol.labels import Status
from pipeline.recording.journal import provenance
from pipeline.recording.journal.recorder import Recorder

MLP = Path(__file__).parents[2] / "experiments" / "mlp.yaml"
MACHINE = Resources(cpus=8, memory_mb=16384, node="laptop")


def planned(directory: Path, *overrides: str, quick: bool = False) -> tuple[Plan, ExperimentFile]:
    file = load(MLP, ["parallel.workers=2", f"tracking.directory={directory}", *overrides])
    return make_plan(file.experiment, MACHINE, allowed=(), with_baseline=False, quick=quick), file


def record(directory: Path, *overrides: str, name: str = "1", status: Status = "FINISHED", **more: Any) -> None:
    plan, file = planned(directory, *overrides)
    folder = directory / f"{name}-{file.experiment.name}-ab12"
    folder.mkdir(parents=True)
    tags = {**provenance.trial_tags(plan.main), "hardware": provenance.hardware(plan), **more}
    opened = RunOpened(
        run=folder.name, tracking_uri="", tracking_experiment="lab", tags=tags, params=flatten(file.experiment),
        trials=("main",), file=file.source,
    )  # fmt: skip
    started = Started(
        trial="main", total_steps=1, steps_per_epoch=1, epochs=1, train_samples=1000, validation_samples=0,
        parameters=1, devices=(), data_name="d", data_digest="x",
    )  # fmt: skip
    with closing(Recorder(folder, subscribers=[])) as recorder:
        for event in (opened, started, finished("main", spread(100)), RunClosed(status=status)):
            recorder.receive(event)


def notes(directory: Path, *overrides: str, quick: bool = False) -> list[str]:
    plan, file = planned(directory, *overrides, quick=quick)
    return [note for note in with_outlook(plan, file).notes if "Estimated" in note]


def test_time_device_hours_and_price_of_the_whole_training(tmp_path: Path) -> None:
    record(tmp_path, "train.epochs=1")
    (note,) = notes(tmp_path, "train.epochs=36", "benchmark.price_per_device_hour=2.5", "optimizer.lr=0.7")
    cores = planned(tmp_path)[0].main.cpus_per_worker * 2
    assert note.startswith(f"the training takes about 6 min ({0.1 * cores:.2g} core hours on {cores} cores, price ")
    assert f"price {0.25 * cores:.2g})" in note
    assert "Estimated from 1-" in note
    assert "36,000 samples at 100 samples/s, without start" in note
    (note,) = notes(tmp_path, "train.epochs=36", "train.minutes=3")
    assert note.startswith("the training takes about 3 min (")
    assert "price" not in note
    for at_least_s in (10, 11):
        short = with_outlook(*planned(tmp_path, "train.epochs=1"), at_least_s=at_least_s)
        assert any("Estimated" in one for one in short.notes) == (at_least_s == 10)


@pytest.mark.parametrize(
    "change", ["model.hidden=[7]", "train.global_batch_size=32", "parallel.workers=1", "train.precision=bf16", "name=a"]
)
def test_another_training_is_no_measure(change: str, tmp_path: Path) -> None:
    record(tmp_path)
    assert notes(tmp_path)
    assert notes(tmp_path, change) == []


def test_only_completed_trainings_count(tmp_path: Path) -> None:
    record(tmp_path, name="1", status="KILLED")
    record(tmp_path, name="2", quick="true")
    record(tmp_path, name="3", hardware="another machine")
    assert notes(tmp_path) == []
    record(tmp_path, name="0")
    assert "Estimated from 0-" in notes(tmp_path)[0]
    assert notes(tmp_path, quick=True) == []


def test_a_damaged_run_does_not_stop_the_next(tmp_path: Path) -> None:
    record(tmp_path)
    (journal,) = tmp_path.glob("*/events.jsonl")
    os.truncate(journal, 0)
    journal.write_text("not json\n")
    assert notes(tmp_path) == []

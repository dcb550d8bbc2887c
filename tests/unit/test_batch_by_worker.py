"""``train.batch_size_per_worker``: a global batch by the most workers of a run, which the run keeps."""

# promise: orders of one's own, and a batch by worker: the same at 1 and 2 workers and resumed within an epoch

from pathlib import Path
from typing import Any

import pytest
import toys
import yaml

from pipeline.drive import resume
from pipeline.errors import ExperimentError
from pipeline.experiment.load import flatten, from_mapping, load, to_yaml
from pipeline.experiment.schema import Experiment
from pipeline.plan.plan import DataSizes, describe, make_plan
from pipeline.plan.resources import Resources
from pipeline.protocol.events import RunOpened
from pipeline.record.folder import RunState

MACHINE = Resources(cpus=8, memory_mb=1024, node="laptop")
GOOD: dict[str, Any] = {
    "name": "by-worker",
    "model": {"_target_": "torch.nn.Linear", "in_features": 4, "out_features": 2},
    "data": {"_target_": "pipeline.data.digits"},
    "loss": {"_target_": "torch.nn.CrossEntropyLoss"},
    "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1},
    "train": {"epochs": 1, "batch_size_per_worker": 12},
    "parallel": {"strategy": "ddp", "launcher": "torchrun", "workers": 4},
}


def read(*overrides: str) -> Experiment:
    return from_mapping(GOOD, overrides).experiment


@pytest.mark.parametrize(("workers", "expected"), [("4", 48), ("1", 12), ("[2, 6]", 72)])
def test_the_global_batch_is_that_of_the_most_workers(workers: str, expected: int) -> None:
    experiment = read(f"parallel.workers={workers}")
    assert (experiment.train.global_batch_size, experiment.train.batch_size_per_worker) == (expected, 12)
    assert Experiment.model_validate_json(experiment.model_dump_json()) == experiment
    assert flatten(experiment)["train.global_batch_size"] == str(expected)


def test_an_override_exchanges_one_key_for_the_other() -> None:
    whole = read("train.batch_size_per_worker=null", "train.global_batch_size=40")
    assert (whole.train.global_batch_size, whole.train.batch_size_per_worker) == (40, None)
    mlp = load(Path(__file__).parents[2] / "experiments" / "mlp.yaml",
               ["train.global_batch_size=null", "train.batch_size_per_worker=8"])  # fmt: skip
    assert mlp.experiment.train.global_batch_size == 16


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.global_batch_size=48"],
         "train.batch_size_per_worker: is 12, and global_batch_size is 48. Remove one of them"),
        (["train.batch_size_per_worker=null"],
         "train.global_batch_size: missing. Set the samples per optimizer step over all workers, or set train"),
        (["train.batch_size_per_worker=0"], "train.batch_size_per_worker: is 0 (an integer); write an integer greater"),
        (["train.batch_size_per_worker=null", "train.global_batch_size=0"],
         "train.global_batch_size: is 0 (an integer); write an integer greater than 0 or null"),
        (["train.gradient_accumulation=13"],
         "train.gradient_accumulation: is 13, but each worker has only 12 samples per step. Use at most 12."),
    ],
)  # fmt: skip
def test_both_neither_and_wrong_numbers_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ExperimentError) as refused:
        read(*overrides)
    (problem,) = refused.value.problems
    assert f"{problem.key}: {problem.message}".startswith(message)


def test_the_resolved_file_gives_the_same_experiment(tmp_path: Path) -> None:
    file, experiment = tmp_path / "experiment.yaml", read()
    file.write_text(to_yaml(experiment))
    assert load(file).experiment == experiment
    assert "global_batch_size" not in yaml.safe_load(file.read_text())["train"]


def test_the_plan_shows_both() -> None:
    plan = make_plan(read(), MACHINE, allowed=())
    assert "global_batch_size: 48\nbatch_size_per_worker: 12\n" in describe(plan, DataSizes(1438, 359, 30))
    assert any(note.startswith("The global batch size is 48 (train.batch_size_per_worker x") for note in plan.notes)
    for workers, batch in ((1, 12), (2, 24), (4, 48)):  # as weak scaling needs
        measured = make_plan(read(f"parallel.workers={workers}"), MACHINE, allowed=()).measured
        assert {trial.experiment.train.global_batch_size for trial in measured} == {batch}
    elastic = describe(make_plan(read("parallel.workers=[2, 6]"), MACHINE, allowed=()), DataSizes(1438, 359, 20))
    assert "global_batch_size: 72\nbatch_size_per_worker: 12\n" in elastic


def test_advice_names_the_key_of_the_file() -> None:
    assert read().batch_keys(96) == {"train.batch_size_per_worker": 24}
    assert read().batch_keys(98) == {"train.batch_size_per_worker": None, "train.global_batch_size": 98}
    assert toys.experiment().batch_keys(98) == {"train.global_batch_size": 98}


def state(*overrides: str, began_with: str = "12") -> RunState:
    """A run that began with so many samples for each worker, as its last session was."""
    params = {"name": "by-worker", "train.batch_size_per_worker": began_with}
    opened = RunOpened(
        time=0, run="r", tracking_uri="", tracking_experiment="by-worker", tags={}, params=params, trials=("main",)
    )
    return RunState(folder=Path("runs/r"), experiment=read(*overrides), opened=opened, status="KILLED")


@pytest.mark.parametrize(
    "before",
    [state(), state("parallel.workers=1", "train.batch_size_per_worker=null", "train.global_batch_size=48")],
    ids=["once", "twice"],
)
def test_a_resumed_run_keeps_its_global_batch_with_other_workers(before: RunState) -> None:
    file = from_mapping(GOOD, ["parallel.workers=2"])
    kept, notes = resume.with_batch_of(file, before)
    assert (kept.experiment.train.global_batch_size, kept.experiment.parallel.workers) == (48, 2)
    told = [*notes, *resume.changes(kept, before, allowed=False)]
    assert told[0] == "The global batch size stays 48, as at the start of r."
    assert not any("batch_size" in note for note in told)


def test_another_batch_for_each_worker_cannot_be_resumed() -> None:
    file = from_mapping(GOOD, ["train.batch_size_per_worker=6"])
    kept, notes = resume.with_batch_of(file, state())
    assert (kept, notes) == (file, [])
    with pytest.raises(ExperimentError) as refused:
        resume.changes(kept, state(), allowed=True)
    (problem,) = refused.value.problems
    assert problem.key == "train.global_batch_size"
    assert problem.message == "is 24, but was 48 in r. Set it back, or start a new run without --resume."

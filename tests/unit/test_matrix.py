"""What a benchmark measures and in which order: pure decisions from an experiment, a machine and a wish."""

from typing import Any

import pytest
import toys

from pipeline.commands.benchmark.matrix import Matrix, MatrixRequest, make_matrix
from pipeline.commands.benchmark.measure import too_small
from pipeline.errors import ResourceError
from pipeline.plan.resources import Resources
from pipeline.protocol.trial import Measurement

LAPTOP = Resources(cpus=2, memory_mb=16384, node="laptop")
SERVER = Resources(cpus=32, memory_mb=262144, gpus=("H200",) * 4, node="server")
DDP = {"strategy": "ddp", "launcher": "torchrun", "workers": 2}


def matrix(resources: Resources = LAPTOP, *, sections: dict[str, Any] | None = None, **wanted: Any) -> Matrix:
    experiment = toys.experiment(**{"parallel": DDP, **(sections or {})})
    return make_matrix(experiment, resources, allowed=("toys",), wanted=MatrixRequest(**wanted))


def titles(made: Matrix) -> list[str]:
    return [cell.title for cell in made.cells]


def test_without_a_wish_it_is_the_baseline_and_the_experiment_itself() -> None:
    made = matrix()
    assert titles(made) == ["1 worker", "ddp, 2 workers"]
    assert [cell.name for cell in made.cells] == ["baseline", "ddp-2"]


def test_a_baseline_that_is_the_experiment_itself_is_measured_once() -> None:
    assert titles(matrix(sections={"benchmark": {"baseline": {"strategy": "ddp"}}})) == ["ddp, 2 workers"]


def test_the_cells_take_turns() -> None:
    trials = matrix(repeats=3).plan.trials
    assert [(trial.name, trial.repeat) for trial in trials] == [
        (name, repeat) for repeat in range(3) for name in ("baseline", "ddp-2", "reference")
    ]
    assert all(isinstance(trial, Measurement) for trial in trials)


def test_the_product_of_strategies_and_workers_where_several_workers_make_sense() -> None:
    made = matrix(strategies=("single", "dp", "ddp"), workers=(1, 2, 4))
    assert titles(made) == ["1 worker", "dp, 1 worker", "ddp, 1 worker", "ddp, 2 workers", "ddp, 4 workers"]


def test_what_does_not_fit_is_kept_with_the_reason() -> None:
    *_, large = matrix(workers=(2, 4)).cells
    assert (large.strategy, large.workers, large.trial) == ("ddp", 4, None)
    assert (
        large.reason
        == "4 workers with 1 core each need 4 cores. laptop has 2 cores, 16 GiB, no GPU. Use at most 2 workers."
    )


def test_more_workers_than_samples_of_a_batch_is_a_reason() -> None:
    *_, cell = matrix(SERVER, workers=(4,), sections={"train": {"global_batch_size": 2}}).cells
    assert cell.reason == "4 workers can't share a global batch of 2 samples"


def test_a_launcher_of_one_process_is_a_reason() -> None:
    made = matrix(workers=(2,), strategies=("ddp",), sections={"parallel": {}})
    assert made.cells[1].reason == "is 2, but inprocess runs one process. Set parallel.launcher to torchrun or ray."


def test_no_room_for_the_baseline_is_an_error() -> None:
    with pytest.raises(ResourceError, match="need 4 cores"):
        matrix(
            sections={
                "benchmark": {"baseline": {"strategy": "ddp", "workers": 4}},
                "parallel": {**DDP, "cpus_per_worker": 1},
            }
        )


@pytest.mark.parametrize(("workers", "cpus"), [((1,), 2), ((2,), 1), ((1, 2, 4), 1)])
def test_every_worker_has_the_same_cores_as_many_as_the_fullest_cell_leaves(workers: Any, cpus: int) -> None:
    trials = [cell.trial for cell in matrix(workers=workers).cells if cell.trial]
    assert {trial.cpus_per_worker for trial in trials} == {cpus}


def test_options_tell_cells_of_the_same_size_apart() -> None:
    baseline = {"strategy": "ddp", "workers": 1, "options": {"static_graph": True, "bucket_cap_mb": 1}}
    made = matrix(sections={"benchmark": {"baseline": baseline}}, workers=(2,), batch_sizes=(8,))
    assert titles(made) == [
        "ddp, 1 worker",
        "ddp, 2 workers (static_graph, bucket_cap_mb=1)",
        "ddp, 2 workers",
        "ddp, 2 workers (batch 8)",
    ]
    assert [cell.name for cell in made.cells] == ["baseline", "ddp-2", "ddp-2-2", "ddp-2-batch-8"]


def test_gpus_need_no_reference_and_a_trace_is_recorded_once() -> None:
    made = matrix(SERVER, workers=(4,), repeats=2, profile=True)
    assert [(trial.name, trial.profile) for trial in made.plan.trials] == [
        ("baseline", True), ("ddp-4", True), ("baseline", False), ("ddp-4", False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("samples", "epochs", "reason"),
    [
        (20, 3, ""),
        (5, 99, "an epoch has 5 samples, fewer than the global batch of 8"),
        (20, 2, "20 samples make 6 steps of 8 in 2 epochs; a measurement needs 8"),
    ],
)
def test_a_small_dataset_cannot_be_measured_on(samples: int, epochs: int, reason: str) -> None:
    trial = toys.trial(max_steps=18, train={"epochs": epochs, "global_batch_size": 8})
    told = too_small(trial, samples=samples)
    assert told.startswith(reason) if reason else told == ""

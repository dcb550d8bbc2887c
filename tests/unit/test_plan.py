"""Who runs where: pure decisions from an experiment and a machine."""

# promise: an autoscaler is asked for nodes; Ray's own
# promise: no silent fallback; errors name place, value and fix, before anything starts

import json
import re
from contextlib import nullcontext
from typing import Any

import pytest
import toys
import yaml

from pipeline.errors import ExperimentError, ResourceError
from pipeline.experiment.schema import Parallel
from pipeline.launch import cluster
from pipeline.plan.plan import DataSizes, Plan, describe, make_plan, record
from pipeline.plan.resources import Resources
from pipeline.protocol.trial import Training, Trial

LAPTOP = Resources(cpus=8, memory_mb=16384, node="laptop")
SERVER = Resources(cpus=32, memory_mb=262144, gpus=("H200",) * 4, node="server")


def plan(resources: Resources = LAPTOP, *, baseline: bool = True, **sections: Any) -> Plan:
    return make_plan(toys.experiment(**sections), resources, allowed=("toys",), with_baseline=baseline)


def ddp(workers: int, **more: Any) -> dict[str, Any]:
    return {"strategy": "ddp", "launcher": "torchrun", "workers": workers, **more}


def shape(trial: Trial) -> tuple[str, str, int, int, int]:
    return trial.role, trial.strategy, trial.workers, trial.devices_per_worker, trial.cpus_per_worker


def test_one_process_is_its_own_baseline() -> None:
    made = plan()
    assert [shape(trial) for trial in made.trials] == [("main", "single", 1, 0, 8)]
    assert made.main.title == "1 worker"
    assert made.notes == (
        "No GPU found. Training on the CPU.", "The training run is the baseline (1 worker), so no speedup is measured."
    )  # fmt: skip


def test_variables_of_a_platform_that_are_ignored_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.1.1.1:6379")
    monkeypatch.setenv("WORLD_SIZE", "1")
    (note,) = (note for note in plan().notes if "ignored" in note)
    assert note == "RAY_ADDRESS=10.1.1.1:6379: ignored. To train on this cluster, set parallel.launcher=ray."
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "7")
    assert any(note.startswith("MLFLOW_EXPERIMENT_ID=7: ignored. Set tracking.experiment") for note in plan().notes)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_ID")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    ranks, _ = (note for note in plan().notes if "ignored" in note)
    assert ranks.startswith("RANK=3, WORLD_SIZE=4: ignored, because torchrun or srun did not start this process.")
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    ranks, _ = (note for note in plan().notes if "ignored" in note)
    assert ranks.startswith("OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=2: ignored")


def test_results_in_the_working_directory_of_a_ray_job_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not [note for note in plan().notes if "Ray deletes" in note]
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", '{"runtime_env": {"working_dir": "gcs://a.zip"}}')
    told = [note for note in plan(tracking={"uri": "http://a"}).notes if "Ray deletes" in note]
    assert told == [
        "tracking.directory is in the working directory of this Ray job, which Ray deletes. Set a lasting place."
    ]
    there = plan(tracking={"uri": "sqlite:////a.db", "directory": "/runs"}, checkpoint={"directory": "s3://a"})
    assert not [note for note in there.notes if "Ray deletes" in note]


def test_workers_on_cpu_are_compared_by_the_training_itself_with_one_and_with_all_their_cores() -> None:
    made = plan(parallel=ddp(3))
    assert [shape(trial) for trial in made.measured] == [
        ("main", "ddp", 3, 0, 2), ("baseline", "single", 1, 0, 2), ("reference", "single", 1, 0, 6),
    ]  # fmt: skip
    assert {trial.launcher for trial in made.measured} == {"torchrun"}
    assert {trial.device for trial in made.measured} == {"cpu"}
    assert all(trial.allowed == ("toys",) for trial in made.measured)
    assert made.trials == (made.main,)
    assert isinstance(made.main, Training)
    assert made.main.compared_with == made.measured[1:]


def beside(made: Plan) -> list[str]:
    """The roles of the trials that the training is compared with; all others are launched before it."""
    assert isinstance(made.main, Training)
    assert made.trials[-1] is made.main
    return [trial.role for trial in made.main.compared_with]


@pytest.mark.parametrize(
    ("main", "baseline", "in_turn"),
    [
        (ddp(2), {"strategy": "single"}, True),
        ({**ddp(2), "strategy": "fsdp"}, {"strategy": "single"}, True),
        (ddp(2), {"strategy": "dp"}, True),  # one replica here
        (ddp(2), {"strategy": "ddp", "workers": 1}, False),  # which needs a process group of its own
        (ddp(2), {"strategy": "fsdp", "workers": 2}, False),
        ({**ddp(2), "strategy": "fsdp"}, {"strategy": "ddp", "workers": 2}, False),
    ],
)
def test_a_baseline_of_several_processes_is_measured_before(
    main: dict[str, Any], baseline: dict[str, Any], in_turn: bool
) -> None:
    made = plan(parallel=main, benchmark={"baseline": baseline})
    assert beside(made) == (["baseline", "reference"] if in_turn else ["reference"])
    assert [trial.role for trial in made.trials] == (["main"] if in_turn else ["baseline", "main"])


def test_dp_beside_ddp_has_more_gpus_than_a_rank() -> None:
    """Under Ray rank 0 sees its own GPU only."""
    made = plan(SERVER, parallel=ddp(4), benchmark={"baseline": {"strategy": "dp"}})
    assert beside(made) == []
    assert [shape(trial) for trial in made.trials] == [("baseline", "dp", 1, 4, 8), ("main", "ddp", 4, 1, 8)]


def test_without_a_baseline_there_is_only_the_training() -> None:
    made = plan(baseline=False, parallel=ddp(2))
    assert [trial.role for trial in made.trials] == ["main"]
    assert made.notes == ("No GPU found. Training on the CPU.",)
    assert beside(made) == beside(plan()) == []  # one process is its own baseline


def scheduled(name: str, *, train: dict[str, Any] | None = None, **arguments: Any) -> Plan:
    declared = {"_target_": f"torch.optim.lr_scheduler.{name}", **arguments}
    return plan(scheduler=declared, train={"epochs": 90, **(train or {})})


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("StepLR", {"step_size": 30}, "step_size is 30. This counts steps"),
        ("MultiStepLR", {"milestones": [30, 80]}, r"milestones is \[30, 80\]. This counts steps"),
        ("CosineAnnealingLR", {"T_max": 90}, "T_max is 90. This counts steps"),
        ("ExponentialLR", {"gamma": 0.9}, "gamma is 0.9. The learning rate is multiplied by gamma after each step"),
    ],
)
def test_a_schedule_in_steps_that_looks_like_epochs_is_told(name: str, arguments: dict[str, Any], said: str) -> None:
    notes = [note for note in scheduled(name, **arguments).notes if note.startswith("scheduler.")]
    assert len(notes) == 1
    assert re.match(rf"scheduler\.{said}.*. To count epochs, set train.scheduler_interval to epoch", notes[0])
    by_epoch = scheduled(name, train={"scheduler_interval": "epoch"}, **arguments)
    assert not any("scheduler" in note for note in by_epoch.notes)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("CosineAnnealingLR", {"T_max": "${total_steps}"}),
        ("StepLR", {"step_size": 1000}),
        ("MultiStepLR", {"milestones": [60, 1000]}),
        ("ExponentialLR", {"gamma": 0.9999}),
        ("StepLR", {"step_size": 30, "train": {"epochs": None, "steps": 600}}),
    ],
)
def test_a_schedule_in_steps_that_is_meant_so_is_not_told(name: str, arguments: dict[str, Any]) -> None:
    assert not any("scheduler" in note for note in scheduled(name, **arguments).notes)


def test_the_schedule_of_each_optimizer_is_looked_at() -> None:
    sgd = {"_target_": "torch.optim.SGD", "lr": 0.1}
    made = plan(
        task={"_target_": "toys.NamedTask"}, loss=None, optimizer=None, train={"epochs": 5},
        optimizers={"one": {**sgd, "params": "weight"}, "other": {**sgd, "params": "bias"}},
        schedulers={"other": {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 5}},
    )  # fmt: skip
    assert any(note.startswith("schedulers.other.step_size is 5. This counts") for note in made.notes)


def test_a_training_only_measures_nothing_and_says_what_is_left_out() -> None:
    made = make_plan(toys.experiment(parallel=ddp(2)), LAPTOP, allowed=("toys",), train_only=True)
    assert [trial.role for trial in made.measured] == ["main"]
    assert made.main == make_plan(
        toys.experiment(parallel=ddp(2)), LAPTOP, allowed=("toys",), with_baseline=False
    ).main.model_copy(update={"train_only": True})
    assert made.notes == (
        "--train-only: no speedup, no step-time breakdown, no recommendations",
        "No GPU found. Training on the CPU.",
    )
    assert "  purpose: trains 2 epochs\n" in describe(made, DataSizes(22, 10, 3))
    assert made.notes[0] in describe(made, DataSizes(22, 10, 3))
    assert json.loads(record(made, DataSizes(22, 10, 3)))["notes"] == list(made.notes)


def test_only_the_training_runs_to_its_end() -> None:
    made = plan(parallel=ddp(2), benchmark={"warmup_steps": 4, "steps": 6, "windows": 3})
    assert [trial.steps_of(1000) for trial in made.measured] == [1000, 10, 10]  # and slots with steps of their own
    apart = plan(
        parallel=ddp(2), benchmark={"warmup_steps": 4, "steps": 6, "baseline": {"strategy": "ddp", "workers": 1}}
    )
    assert [trial.steps_of(1000) for trial in apart.trials] == [22, 1000]


def test_cores_and_options_are_as_written() -> None:
    made = plan(parallel=ddp(2, cpus_per_worker=3, options={"bucket_cap_mb": 7}))
    assert [shape(trial)[-1] for trial in made.measured] == [3, 3, 6]
    assert made.main.options == {"bucket_cap_mb": 7}
    assert made.measured[1].options == {}


def test_a_baseline_is_the_training_itself_unless_its_workers_or_options_differ() -> None:
    made = plan(parallel=ddp(4), benchmark={"baseline": {"strategy": "ddp"}})
    assert [trial.role for trial in made.measured] == ["main", "reference"]  # ddp, 4 workers is the main trial itself
    assert "The training run is the baseline (ddp, 4 workers), so no speedup is measured." in made.notes
    made = plan(parallel=ddp(4), benchmark={"baseline": {"strategy": "ddp", "workers": 2}})
    assert shape(made.trials[0]) == ("baseline", "ddp", 2, 0, 2)
    made = plan(parallel=ddp(2), benchmark={"baseline": {"strategy": "ddp", "options": {"bucket_cap_mb": 1}}})
    assert [trial.role for trial in made.measured] == ["baseline", "main", "reference"]


def test_workers_on_gpus_take_one_each_and_need_no_reference() -> None:
    made = plan(SERVER, parallel=ddp(4))
    assert [shape(trial) for trial in made.measured] == [("main", "ddp", 4, 1, 8), ("baseline", "single", 1, 1, 8)]
    assert {trial.device for trial in made.measured} == {"cuda"}
    assert made.main.title == "ddp, 4 workers"
    assert made.notes == ()


def test_dp_takes_all_gpus_in_one_process() -> None:
    made = plan(SERVER, parallel={"strategy": "dp"})
    assert shape(made.main) == ("main", "dp", 1, 4, 32)
    assert made.main.title == "dp, 4 GPUs"
    assert shape(made.measured[1]) == ("baseline", "single", 1, 1, 32)
    assert beside(made) == ["baseline"]
    assert made.notes == ()


@pytest.mark.parametrize("resources", [LAPTOP, SERVER.model_copy(update={"gpus": ("H200",)})])
def test_dp_without_two_gpus_is_one_replica(resources: Resources) -> None:
    made = plan(resources, parallel={"strategy": "dp"})
    assert made.main.title == "dp, 1 worker"
    assert (
        "DataParallel (dp) needs at least 2 GPUs. With fewer, it runs a single replica and gives no speedup."
        in made.notes
    )


def test_gpus_may_be_left_alone() -> None:
    made = plan(SERVER, parallel=ddp(2, device="cpu"))
    assert {(trial.device, trial.devices_per_worker) for trial in made.measured} == {("cpu", 0)}
    assert [trial.role for trial in made.measured] == ["main", "baseline", "reference"]
    assert made.notes == ()


@pytest.mark.parametrize(
    ("workers", "nodes", "cores"),
    [(1, 2, 4), (2, 2, 4), (3, 2, 2), (4, 2, 2), (4, 3, 2), (5, 2, 1)],
)
def test_a_workers_cores_are_on_one_node(workers: int, nodes: int, cores: int) -> None:
    made = plan(Resources(cpus=4 * nodes, memory_mb=1, nodes=nodes), parallel=ddp(workers))
    assert made.main.cpus_per_worker == cores
    assert -(-workers // nodes) * cores <= 4
    assert "reference" not in [trial.role for trial in made.measured]  # one process can't have the cores of two nodes


def test_dp_on_a_cluster_has_the_gpus_of_one_node() -> None:
    cluster = Resources(cpus=16, memory_mb=1, gpus=("GPU",) * 8, nodes=2)
    assert plan(cluster, parallel={"strategy": "dp", "launcher": "ray"}).main.devices_per_worker == 4


@pytest.mark.parametrize(("device", "cores", "nodes"), [("auto", 16, 1), ("cuda", 16, 1), ("cpu", 24, 2)])
def test_a_cluster_s_nodes_without_gpus_count_on_cpu_only(
    device: str, cores: int, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"NodeManagerHostname": "n", "NodeManagerAddress": "10.0.0.2"}
    amounts = {"head": {"CPU": 8.0, "memory": 1e9}, "other": {"CPU": 16.0, "memory": 1e9, "GPU": 4.0}}
    amounts["other"]["accelerator_type:H200"] = 1.0
    records = [{"NodeID": name, "Resources": each, **place} for name, each in amounts.items()]
    monkeypatch.setattr(cluster, "connected", lambda *_, **__: nullcontext())
    monkeypatch.setattr(cluster, "reachable_nodes", lambda: records)
    monkeypatch.setattr(cluster.ray, "nodes", lambda: records)
    monkeypatch.setattr(cluster.ray, "available_resources", lambda: {"CPU": 20.0, "GPU": 1.0, "node:10.0.0.2": 1.0})

    there = cluster.find_resources("10.0.0.1:6379", Parallel(device=device))
    assert (there.cpus, there.nodes, there.gpus) == (cores, nodes, ("H200",) * 4)
    assert there.idle == ({"CPU": min(20, cores), "GPU": 1},)
    if device == "auto":
        assert plan(there, parallel={**ddp(4), "launcher": "ray"}).main.cpus_per_worker == 4
        assert plan(there, parallel={"strategy": "dp", "launcher": "ray"}).main.devices_per_worker == 4


@pytest.mark.parametrize(
    ("resources", "parallel", "message"),
    [
        (
            LAPTOP, ddp(8, cpus_per_worker=2),
            "parallel.workers: 8 workers with 2 cores each need 16 cores. laptop has 8 cores, 16 GiB, no GPU. "
            "Use at most 4 workers.",
        ),
        (
            Resources(cpus=1, memory_mb=2048, node="tiny"), ddp(2),
            "parallel.workers: 2 workers with 1 core each need 2 cores. tiny has 1 core, 2 GiB, no GPU. "
            "Use at most 1 worker.",
        ),
        (
            LAPTOP, {"cpus_per_worker": 16},
            "parallel.workers: 1 worker with 16 cores each need 16 cores. laptop has 8 cores, 16 GiB, no GPU. "
            "Set parallel.cpus_per_worker to 8.",
        ),
        (
            SERVER, ddp(6),
            "parallel.workers: 6 workers need 6 GPUs. server has 32 cores, 256 GiB, 4 x H200. "
            "Use fewer workers, or device: cpu.",
        ),
        (
            SERVER, {"strategy": "dp", "gpus_per_worker": 8},
            "parallel.gpus_per_worker: 1 worker with 8 GPUs each need 8 GPUs. server has 32 cores, "
            "256 GiB, 4 x H200. Use fewer GPUs, or device: cpu.",
        ),
        (
            LAPTOP, {"device": "cuda"},
            "parallel.device: cuda needs a GPU. laptop has 8 cores, 16 GiB, no GPU. Use auto or cpu.",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(resources: Resources, parallel: dict[str, Any], message: str) -> None:
    with pytest.raises(ResourceError) as caught:
        plan(resources, parallel=parallel)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("sections", "key", "message"),
    [
        (
            {"parallel": {"strategy": "ddp", "workers": 2}}, "parallel.workers",
            "is 2, but inprocess runs one process. Set parallel.launcher to torchrun or ray.",
        ),
        (
            {"benchmark": {"baseline": {"strategy": "ddp", "workers": 2}}}, "benchmark.baseline.workers",
            "is 2, but inprocess runs one process. Set parallel.launcher to torchrun or ray.",
        ),
        (
            {"parallel": ddp(2, options={"sync_batch_norm": True})}, "parallel.options",
            "sync_batch_norm needs GPUs, since torch's SyncBatchNorm does not support the CPU; remove it",
        ),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(sections: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        plan(**sections)
    (problem,) = caught.value.problems
    assert (problem.key, problem.message) == (key, message)


def test_the_plan_is_one_record_as_yaml_and_as_json() -> None:
    made = plan(parallel=ddp(3), train={"epochs": 2, "gradient_accumulation": 2}, benchmark={"warmup_steps": 4})
    sizes = DataSizes(22, 10, 3)
    text = describe(made, sizes)
    assert text == GOLDEN
    whole = json.loads(record(made, sizes))
    shown = yaml.safe_load(text)
    known = [{key: value for key, value in trial.items() if value is not None} for trial in whole["trials"]]
    assert {key: whole[key] for key in shown} | {"trials": known} == shown


def test_a_baseline_that_is_launched_before_is_the_first_in_words() -> None:
    made = plan(parallel=ddp(3), benchmark={"baseline": {"strategy": "ddp", "workers": 2}})
    first, main, then = yaml.safe_load(describe(made, DataSizes(22, 10, 3)))["trials"]
    titles = ["ddp, 2 workers", "ddp, 3 workers", "1 process, 6 cores"]
    assert [trial["title"] for trial in (first, main, then)] == titles
    assert first["purpose"] == "measures throughput in 3 windows of 5 steps after 3 warm-up steps"
    assert then["purpose"].startswith("is measured in turn with the training, at most 16 rounds in about 30 s")


def test_the_plan_in_words_on_gpus() -> None:
    (main,) = yaml.safe_load(describe(plan(SERVER, baseline=False, parallel=ddp(4)), DataSizes(22, 0, 3)))["trials"]
    assert (main["gpus_per_worker"], main["threads_per_worker"], main["samples_per_worker"]) == (1, 8, 2)


def test_omp_num_threads_is_respected_unless_cores_are_given() -> None:
    made = plan(LAPTOP.model_copy(update={"threads": 1}), parallel=ddp(2))
    assert [shape(trial)[-1] for trial in made.measured] == [1, 1, 2]
    (note,) = (note for note in made.notes if "OMP" in note)
    assert note == (
        "OMP_NUM_THREADS=1: each worker has 1 thread, and there is room for 4. "
        "To use them, set parallel.cpus_per_worker=4."
    )
    for threads, given, expected in ((16, None, 4), (1, 3, 3), (None, None, 4)):
        made = plan(LAPTOP.model_copy(update={"threads": threads}), parallel=ddp(2, cpus_per_worker=given))
        assert made.main.cpus_per_worker == expected
        assert not any("OMP" in note for note in made.notes)


GOLDEN = """\
experiment: toy
seed: 3
machine: 8 cores, 16 GiB, no GPU
train_samples: 22
validation_samples: 10
steps_per_epoch: 3
test_samples: 0
total_steps: 6
epochs: 2
global_batch_size: 8
gradient_accumulation: 2
precision: fp64
model: torch.nn.Linear
optimizers:
- torch.optim.SGD
tracking: sqlite:///mlflow.db
tracking_from: default
trials:
- name: main
  role: main
  title: ddp, 3 workers
  strategy: ddp
  launcher: torchrun
  workers: 3
  device: cpu
  cpus_per_worker: 2
  threads_per_worker: 2
  samples_per_worker: 2 or 3
  purpose: trains 2 epochs; measures throughput, step time and peak memory
- name: baseline
  role: baseline
  title: 1 worker
  strategy: single
  launcher: torchrun
  workers: 1
  device: cpu
  cpus_per_worker: 2
  threads_per_worker: 2
  samples_per_worker: 8
  max_steps: 9
  purpose: is measured in turn with the training, at most 16 rounds in about 30 s; rank 0 holds one more copy of
    the model meanwhile
- name: reference
  role: reference
  title: 1 process, 6 cores
  strategy: single
  launcher: torchrun
  workers: 1
  device: cpu
  cpus_per_worker: 6
  threads_per_worker: 6
  samples_per_worker: 8
  max_steps: 9
  purpose: is measured in turn with the training, at most 16 rounds in about 30 s; rank 0 holds one more copy of
    the model meanwhile
notes:
- No GPU found. Training on the CPU."""


EMPTY = Resources(cpus=0, memory_mb=0, node="Ray cluster at head:6379", is_autoscaled=True)
HEAD = Resources(cpus=4, memory_mb=4096, node="Ray cluster at head:6379", is_autoscaled=True)
GPUS = Resources(cpus=8, memory_mb=4096, gpus=("GPU",) * 2, node="Ray cluster at head:6379", is_autoscaled=True)
TWO = {"strategy": "ddp", "launcher": "ray", "workers": 2}


def autoscaled(there: Resources, **parallel: object) -> Plan:
    return make_plan(toys.experiment(parallel={**TWO, **parallel}), there, allowed=("toys",), with_baseline=True)


def test_what_does_not_fit_is_planned_where_nodes_can_be_added() -> None:
    made = autoscaled(EMPTY, device="cpu", cpus_per_worker=4)
    assert (made.main.workers, made.main.cpus_per_worker) == (2, 4)
    assert "Room for 0 of 2 workers is free. The cluster's autoscaler may add nodes." in made.notes
    assert "reference" not in [trial.role for trial in made.measured]  # no node may have the cores of both
    assert autoscaled(EMPTY, device="cuda", strategy="dp", workers=1).main.devices_per_worker == 1
    assert autoscaled(GPUS, workers=4).main.device == "cuda"
    assert autoscaled(HEAD, workers=[1, 9], cpus_per_worker=4).main.workers == 1
    assert not [note for note in autoscaled(HEAD).notes if "room" in note]


def test_a_device_that_is_not_set_is_that_of_the_nodes_there_are() -> None:
    assert "No GPU found. Training on the CPU." in autoscaled(HEAD, cpus_per_worker=4).notes

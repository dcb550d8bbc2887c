"""One process, one rank: what it reports, replaying it by hand, and the load of its node."""

# promise: values of the environment are written nowhere
# promise: dp on several GPUs, a rank's own GPU, memory for the baseline (stand-ins of GPUs)

import os
import threading
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch
import torch.distributed as dist
import toys

import pipeline
from pipeline import worker
from pipeline.errors import Stopped
from pipeline.protocol.events import AnyEvent, Failed, Finished, SystemMetrics, Warned
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import Trial


@pytest.fixture(autouse=True)
def same_threads() -> Any:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def failure(trial: Trial) -> Failed:
    outbox = toys.Kept()
    with pytest.raises(worker.WorkerFailed):
        worker.run(trial, rank=Rank(), outbox=outbox)
    last = outbox.events[-1]
    assert isinstance(last, Failed)
    return last


def test_a_rank_reports_its_end() -> None:
    outbox = toys.Kept()
    worker.run(toys.trial(), rank=Rank(), outbox=outbox)

    (end,) = [event for event in outbox.events if isinstance(event, Finished)]
    assert outbox.events[-1] is end
    assert end.result.steps == 6
    assert end.result.metrics["validation/loss"] == outbox.series("validation/loss")[-1]
    assert torch.get_num_threads() == 1  # cpus_per_worker


def test_the_precision_of_matrix_products_is_that_of_the_file_while_it_trains() -> None:
    outbox = toys.Kept()
    worker.run(toys.trial(train={"matmul_precision": "high"}), rank=Rank(), outbox=outbox)
    (end,) = [event for event in outbox.events if isinstance(event, Finished)]
    assert end.result.matmul_precision == "high"
    assert torch.get_float32_matmul_precision() == "highest"


def test_cudnn_times_its_kernels_while_a_trial_with_that_key_runs() -> None:
    trial = toys.trial(train={"cudnn_benchmark": True}, model={"_target_": "toys.benchmarked"})
    worker.run(trial, rank=Rank(), outbox=toys.Kept())
    assert not torch.backends.cudnn.benchmark


def test_code_that_sets_another_precision_is_told() -> None:
    outbox = toys.Kept()
    worker.run(
        toys.trial(train={"matmul_precision": "highest"}, model={"_target_": "toys.tf32_model"}),
        rank=Rank(),
        outbox=outbox,
    )
    (told,) = [event.message for event in outbox.events if isinstance(event, Warned)]
    assert told.startswith("train.matmul_precision is highest, but user code set high, which is used")
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"_target_": "toys.tf32_model_by_backend"}},
        {"model": {"_target_": "toys.TF32InEvaluation"}},
        {"metrics": {"tf32": {"_target_": "toy_metrics.TF32"}}},
    ],
    ids=["constructor", "evaluation", "metric"],
)
def test_code_that_sets_tf32_by_the_newer_api_is_trained(sections: dict[str, Any]) -> None:
    """`torch.get_float32_matmul_precision` raises from then on."""
    outbox = toys.Kept()
    worker.run(toys.trial(**sections), rank=Rank(), outbox=outbox)
    (end,) = [event for event in outbox.events if isinstance(event, Finished)]
    assert end.result.matmul_precision == "high"
    assert torch.get_float32_matmul_precision() == "highest"


def test_the_traceback_starts_where_the_users_code_does() -> None:
    failed = failure(toys.trial(model={"_target_": "toys.BrokenModel"}))
    lines = failed.traceback.splitlines()

    assert failed.error == "LookupError: the user's own mistake"
    assert failed.problems == ()
    assert lines[0] == "Traceback (most recent call last):"
    assert "toys.py" in lines[1]
    assert "in forward" in lines[1]
    assert lines[-1] == failed.error
    assert len(lines) == 4


def test_a_layer_of_torch_that_fails_is_named_without_the_frames_that_lead_to_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failed = failure(toys.trial(model={"_target_": "torch.nn.Linear", "in_features": 7, "out_features": 1}))
    assert failed.error.startswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied (")
    assert failed.error.endswith("; in Linear(in_features=7, out_features=1, bias=True)")
    assert failed.traceback == ""
    assert "linear.py" in caplog.text


def test_an_error_that_this_project_raises_keeps_its_whole_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "train", toys.trial)  # which takes other arguments
    assert '/pipeline/worker.py", line' in failure(toys.trial()).traceback


def test_a_package_whose_name_begins_like_ours_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as torchvision beside torch, or a project beside this package."""
    beside = Path(pipeline.__file__).parent
    code = compile("def forward(self, inputs): raise LookupError('theirs')", f"{beside}_of_mine/model.py", "exec")
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    monkeypatch.setattr(toys.BrokenModel, "forward", namespace["forward"])

    first = failure(toys.trial(model={"_target_": "toys.BrokenModel"})).traceback.splitlines()[1]
    assert first.endswith('pipeline_of_mine/model.py", line 1, in forward')


def test_a_model_that_calls_exit_is_a_failure() -> None:
    assert failure(toys.trial(model={"_target_": "toys.Quits"})).error == "SystemExit: the user's model gives up"


def test_a_mistake_in_the_experiment_comes_as_problems() -> None:
    failed = failure(toys.trial(model={"_target_": "toys.not_a_model"}))
    (problem,) = failed.problems
    assert problem.key == "model"
    assert failed.traceback == ""


def test_a_broken_sample_comes_with_the_datasets_traceback() -> None:
    failed = failure(toys.trial(data={"_target_": "toys.unreadable", "index": 5}))
    assert failed.error == "sample 5 of the data can't be read: OSError: no such image"
    assert "toys.py" in failed.traceback.splitlines()[1]


def test_a_failure_has_the_reference_to_a_variable_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAB_HOST", "db.hunter2")
    for name in ("toys.BrokenModel", "toys.Refused"):
        failed = failure(toys.trial(model={"_target_": name, "why": "no access to ${oc.env:LAB_HOST}/x"}))
        assert "no access to ${oc.env:LAB_HOST}/x" in failed.error
        assert "hunter2" not in failed.model_dump_json()


def test_a_node_without_the_folder_of_the_run_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    there = toys.trial(model={"_target_": "toys.BrokenModel"}).model_copy(update={"folder": str(tmp_path / "gone")})
    assert failure(there).error == (
        f"{os.uname().nodename} has no folder {tmp_path}/gone. All nodes must share the folder of runs. "
        "Set tracking.directory to a place that they share."
    )


def test_a_strategy_that_needs_a_process_group_gets_one() -> None:
    trial = toys.trial().model_copy(update={"strategy": "ddp"})
    alone, grouped = toys.Kept(), toys.Kept()
    worker.run(trial, rank=Rank(), outbox=grouped)
    worker.run(toys.trial(), rank=Rank(), outbox=alone)

    assert not torch.distributed.is_initialized()
    assert grouped.series("train/loss") == pytest.approx(alone.series("train/loss"), rel=1e-12)


def test_a_failure_leaves_no_process_group() -> None:
    failure(toys.trial(model={"_target_": "toys.BrokenModel"}).model_copy(update={"strategy": "ddp"}))
    assert not torch.distributed.is_initialized()


def test_an_error_is_reported_before_an_abort_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL waits for the other ranks, which wait for the failed one."""
    trial = toys.trial(model={"_target_": "toys.BrokenModel"}).model_copy(update={"strategy": "ddp"})
    outbox, freed, reported = toys.Kept(), threading.Event(), list[AnyEvent]()
    monkeypatch.setattr(worker, "_ABORT_S", 0.1)
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", freed.wait)
    monkeypatch.setattr(dist, "destroy_process_group", pytest.fail)
    with pytest.raises(worker.WorkerFailed):
        worker.run(trial, rank=Rank(), outbox=outbox, end=lambda: reported.extend(outbox.events))
    freed.set()
    monkeypatch.undo()
    dist.destroy_process_group()
    assert [event.error for event in reported if isinstance(event, Failed)] == ["LookupError: the user's own mistake"]


def test_a_group_of_gpus_outlasts_the_hang_detector_and_is_destroyed_at_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(worker, "device_of", lambda *_, **__: torch.device("cuda", 1))
    monkeypatch.setattr(dist, "init_process_group", lambda **given: calls.append(given))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("destroyed"))
    trial = toys.trial(parallel={"timeout_s": 100}).model_copy(update={"strategy": "ddp"})
    with pytest.raises(Stopped), worker.process_group(trial, Rank(), store=None, end=None):
        raise Stopped
    given, end = calls
    assert (given["backend"], given["device_id"]) == ("nccl", torch.device("cuda", 1))
    assert given["timeout"] == timedelta(seconds=160)
    assert end == "destroyed"


def test_a_rank_without_a_gpu_of_its_own_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    update = {"strategy": "ddp", "workers": 2, "device": "cuda", "devices_per_worker": 1}
    rank, outbox = Rank(local_rank=2, world_size=2, local_world_size=4, node="node"), toys.Kept()
    with pytest.raises(worker.WorkerFailed):
        worker.run(toys.trial().model_copy(update=update), rank=rank, outbox=outbox)

    (failed,) = [event for event in outbox.events if isinstance(event, Failed)]
    message = "rank 0 on node has no GPU: CUDA shows 2 GPUs to 4 ranks (CUDA_VISIBLE_DEVICES: 0,1). Start at most"
    assert failed.error.startswith(message)
    assert failed.traceback == ""


class Waiting(toys.Kept):
    """Tells when some samples have come."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.enough = threading.Event()
        self.count = count

    def event(self, event: AnyEvent) -> None:
        super().event(event)
        if len(self.events) >= self.count:
            self.enough.set()


def sampled(rank: Rank, *, count: int = 1, **on: object) -> list[SystemMetrics]:
    outbox = Waiting(count)
    with worker.system_sampled(toys.trial().model_copy(update=on), rank, outbox):
        assert outbox.enough.wait(timeout=30)
    return [event for event in outbox.events if isinstance(event, SystemMetrics)]


def test_the_load_of_a_node_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "INTERVAL_S", 0.05)
    first, second, *_ = sampled(Rank(node="n"), count=2)
    values = {point.name: point.value for point in second.points}

    assert (first.node, {point.step for point in first.points}, {point.step for point in second.points}) == (
        "n", {0}, {1},
    )  # fmt: skip
    for name in ("cpu_utilization", "system_memory_usage", "disk_usage"):
        assert 0 <= values[f"system/{name}_percentage"] <= 100
    assert values["system/system_memory_usage_megabytes"] > 100
    assert values["system/network_receive_megabytes"] >= 0


def test_a_training_shorter_than_an_interval_has_a_sample() -> None:
    outbox = toys.Kept()
    with worker.system_sampled(toys.trial(), Rank(), outbox):
        pass
    (event,) = outbox.events
    assert isinstance(event, SystemMetrics)
    assert "system/cpu_utilization_percentage" in {point.name for point in event.points}


def test_several_nodes_are_told_apart() -> None:
    (event, *_) = sampled(Rank(rank=2, world_size=4, local_world_size=2, node="node-1"))
    assert all(point.name.startswith("system/node-1/") for point in event.points)


def test_gpus_of_the_ranks_are_sampled_without_those_that_report_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the first can't be opened, the second reports no utilization, and no rank uses the fourth."""

    def answer(handle: str) -> Any:
        if handle in ("GPU-0", "opened GPU-1"):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(gpu=7, used=1, total=2)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=index))
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: answer(uuid) and f"opened {uuid}")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", answer)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", answer)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetPowerUsage", lambda _: 70_000)
    (event, *_) = sampled(Rank(local_world_size=3, world_size=3), devices_per_worker=1)
    values = {point.name: point.value for point in event.points}
    assert "system/cpu_utilization_percentage" in values
    assert values["system/gpu_2_power_usage_watts"] == 70
    assert {name.split("/")[1][:5] for name in values if "gpu_" in name} == {"gpu_2"}


def test_one_rank_of_a_node_samples_and_only_in_trainings() -> None:
    def kinds(trial: Trial, rank: Rank) -> list[str]:
        started: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker, "system_sampled", lambda *_: nullcontext(started.append("sampler")))
            worker.run(trial, rank=rank, outbox=toys.Kept())
        return started

    assert kinds(toys.trial(), Rank()) == ["sampler"]
    assert kinds(toys.trial(), Rank(local_rank=1)) == []
    assert kinds(toys.trial(max_steps=2), Rank()) == []

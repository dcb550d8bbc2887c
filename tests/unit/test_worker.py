"""One process, one rank: what it reports, whose errors are whose, and the load of its node."""

# promise: values of the environment are written nowhere
# promise: dp on several GPUs, a rank's own GPU, memory for the baseline (stand-ins of GPUs)

import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch
import torch.distributed as dist
import toy_metrics
import toys
from torch import Tensor, nn
from torch.utils.data import Dataset

import pipeline
from pipeline import worker
from pipeline.errors import Stopped
from pipeline.protocol.events import AnyEvent, Failed, Finished, SystemMetrics
from pipeline.protocol.trial import Rank, Trial
from pipeline.train.errors import is_out_of_memory, origin


class TF32(toy_metrics.Count):
    """Sets TF32 by the newer API."""

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        super().update(outputs, targets)
        torch.backends.cuda.matmul.fp32_precision = "tf32"  # type: ignore[attr-defined]


def far_away() -> tuple[Dataset[Any], None]:
    """Each sample comes over a connection that breaks."""
    return toys.Plain([ConnectionResetError(104, "Connection reset by peer")] * 8), None


def tf32_model() -> nn.Module:
    torch.set_float32_matmul_precision("high")
    return nn.Linear(3, 1)


def tf32_model_by_backend() -> nn.Module:
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # type: ignore[attr-defined]
    return nn.Linear(3, 1)


class TF32InEvaluation(nn.Linear):
    """Sets TF32 by the newer API, but not before it is evaluated."""

    def __init__(self) -> None:
        super().__init__(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training:
            torch.backends.cuda.matmul.fp32_precision = "tf32"  # type: ignore[attr-defined]
        return super().forward(inputs)


def set_as_declared() -> nn.Module:
    assert torch.backends.cudnn.benchmark
    assert torch.get_float32_matmul_precision() == "high"
    return nn.Linear(3, 1)


class Refused(toys.BrokenModel):
    def __init__(self, why: str) -> None:
        raise ValueError(why)


class Quits(toys.BrokenModel):
    def forward(self, inputs: Tensor) -> Tensor:
        raise SystemExit("the user's model gives up")


@pytest.fixture(autouse=True)
def same_threads() -> Any:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def ended(**sections: Any) -> Finished:
    """Run a worker to its end."""
    outbox = toys.Kept()
    worker.run(toys.trial(**sections), rank=Rank(), outbox=outbox)
    (end,) = [event for event in outbox.events if isinstance(event, Finished)]
    assert outbox.events[-1] is end
    return end


def failure(trial: Trial, rank: Rank = Rank()) -> Failed:  # noqa: B008
    outbox = toys.Kept()
    with pytest.raises(worker.WorkerFailed):
        worker.run(trial, rank=rank, outbox=outbox)
    last = outbox.events[-1]
    assert isinstance(last, Failed)
    return last


BROKEN: dict[str, Any] = {"model": {"_target_": "toys.BrokenModel"}}


def test_a_rank_reports_its_end() -> None:
    end = ended()
    assert end.result.steps == 6
    assert end.result.metrics["validation/loss"] == toys.trained()[1].series("validation/loss")[-1]
    assert torch.get_num_threads() == 1  # cpus_per_worker


def test_settings_of_torch_are_those_of_the_file_while_it_trains() -> None:
    train = {"matmul_precision": "high", "cudnn_benchmark": True}
    ended(train=train, model={"_target_": "test_worker.set_as_declared"})
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cudnn.benchmark


def test_code_that_sets_another_precision_is_told() -> None:
    outbox = toys.Kept()
    trial = toys.trial(train={"matmul_precision": "highest"}, model={"_target_": "test_worker.tf32_model"})
    worker.run(trial, rank=Rank(), outbox=outbox)
    (told,) = outbox.warnings
    assert told.startswith("train.matmul_precision is highest, but user code set high, which is used")
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"_target_": "test_worker.tf32_model_by_backend"}},
        {"model": {"_target_": "test_worker.TF32InEvaluation"}},
        {"metrics": {"tf32": {"_target_": "test_worker.TF32"}}},
    ],
    ids=["constructor", "evaluation", "metric"],
)
def test_code_that_sets_tf32_by_the_newer_api_is_trained(sections: dict[str, Any]) -> None:
    """`torch.get_float32_matmul_precision` raises from then on."""
    assert ended(**sections).result.steps == 6
    assert torch.get_float32_matmul_precision() == "highest"


# Failures


def test_the_traceback_starts_where_the_users_code_does() -> None:
    failed = failure(toys.trial(**BROKEN))
    lines = failed.traceback.splitlines()
    assert failed.error == "LookupError: the user's own mistake"
    assert failed.problems == ()
    assert lines[0] == "Traceback (most recent call last):"
    assert "toys.py" in lines[1]
    assert "in forward" in lines[1]
    assert lines[-1] == failed.error
    assert len(lines) == 4


def test_what_needs_no_traceback_has_none(caplog: pytest.LogCaptureFixture) -> None:
    """A layer of torch that fails is named without the frames that lead to it; a mistake comes as problems."""
    failed = failure(toys.trial(model={"_target_": "torch.nn.Linear", "in_features": 7, "out_features": 1}))
    assert failed.error.startswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied (")
    assert failed.error.endswith("; in Linear(in_features=7, out_features=1, bias=True)")
    assert failed.traceback == ""
    assert "linear.py" in caplog.text
    failed = failure(toys.trial(model={"_target_": "toys.not_a_model"}))
    assert ([problem.key for problem in failed.problems], failed.traceback) == (["model"], "")
    assert failure(toys.trial(model={"_target_": "test_worker.Quits"})).error == "SystemExit: the user's model gives up"


def test_an_error_that_this_project_raises_keeps_its_whole_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "train", toys.trial)  # which takes other arguments
    assert '/pipeline/worker.py", line' in failure(toys.trial()).traceback


def test_a_package_whose_name_begins_like_ours_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as torchvision next to torch, or a project next to this package."""
    package, namespace = Path(pipeline.__file__).parent, dict[str, Any]()
    code = "def forward(self, inputs): raise LookupError('theirs')"
    exec(compile(code, f"{package}_of_mine/model.py", "exec"), namespace)
    monkeypatch.setattr(toys.BrokenModel, "forward", namespace["forward"])
    first = failure(toys.trial(**BROKEN)).traceback.splitlines()[1]
    assert first.endswith('pipeline_of_mine/model.py", line 1, in forward')


def test_an_error_of_a_dataset_is_the_runs_own_with_its_traceback() -> None:
    """Though its words are those of a lost rank."""
    unreadable = {"_target_": "toys.unreadable", "index": 5}
    for data, error in (
        (unreadable, "sample 5 of the data can't be read: OSError: no such image"),
        ({"_target_": "test_worker.far_away"}, "ConnectionResetError: [Errno 104] Connection reset by peer"),
    ):
        failed = failure(toys.trial(data=data))
        assert failed.error.endswith(error)
        assert failed.origin == "rank"
        assert "toys.py" in failed.traceback.splitlines()[1]


def test_a_failure_has_the_reference_to_a_variable_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAB_HOST", "db.hunter2")
    for name in ("toys.BrokenModel", "test_worker.Refused"):
        failed = failure(toys.trial(model={"_target_": name, "why": "no access to ${oc.env:LAB_HOST}/x"}))
        assert "no access to ${oc.env:LAB_HOST}/x" in failed.error
        assert "hunter2" not in failed.model_dump_json()


def test_a_node_without_the_folder_of_the_run_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    there = toys.trial(**BROKEN, folder=str(tmp_path / "gone"))
    assert failure(there).error == (
        f"{os.uname().nodename} has no folder {tmp_path}/gone. All nodes must share the folder of runs. "
        "Set tracking.directory to a place that they share."
    )


# Process groups


def test_a_strategy_that_needs_a_process_group_gets_one_and_leaves_none() -> None:
    grouped = toys.Kept()
    worker.run(toys.trial(strategy="ddp"), rank=Rank(), outbox=grouped)
    assert not torch.distributed.is_initialized()
    assert grouped.series("train/loss") == pytest.approx(toys.trained()[1].series("train/loss"), rel=1e-12)
    failure(toys.trial(**BROKEN, strategy="ddp"))
    assert not torch.distributed.is_initialized()


def test_an_error_is_reported_before_an_abort_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL waits for the other ranks, which wait for the failed one."""
    trial = toys.trial(model={"_target_": "toys.BrokenModel"}, strategy="ddp")
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
    trial = toys.trial(parallel={"timeout_s": 100}, strategy="ddp")
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
    rank = Rank(local_rank=2, world_size=2, local_world_size=4, node="node")
    failed = failure(toys.trial().model_copy(update=update), rank)
    message = "rank 0 on node has no GPU: CUDA shows 2 GPUs to 4 ranks (CUDA_VISIBLE_DEVICES: 0,1). Start at most"
    assert failed.error.startswith(message)
    assert failed.traceback == ""


# The load of a node


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
    assert (first.node, {p.step for p in first.points}, {p.step for p in second.points}) == ("n", {0}, {1})
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


# Errors that share their type, or their words, with those of collectives and of memory that runs out

CLOSED = "[/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:51423"
LATE = "[/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete"


def caught(act: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as info:  # noqa: PT011 (any)
        act()
    return info.value


def fail(error: BaseException) -> None:
    raise error


def by_torch(error: BaseException) -> BaseException:
    """The error, raised as by torch.distributed."""
    file = Path(dist.__file__ or "").parent / "distributed_c10d.py"
    namespace: dict[str, Any] = {}
    exec(compile("def all_reduce(error): raise error", str(file), "exec"), namespace)
    return caught(lambda: namespace["all_reduce"](error))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError(CLOSED), "lost_peer"),
        (RuntimeError(f"Got the following error when running the callback: RuntimeError: {CLOSED}"), "lost_peer"),
        (dist.DistBackendError("NCCL error: remote process exited"), "lost_peer"),
        (dist.DistNetworkError("Failed to recv, got 0 bytes"), "lost_peer"),
        (RuntimeError(LATE), "peer_timeout"),
        (RuntimeError("Application timeout caused pair closure"), "peer_timeout"),
        (dist.DistBackendError("Watchdog caught collective operation timeout: WorkNCCL"), "peer_timeout"),
        (RuntimeError("[enforce fail at /gloo/gloo/transport/tcp/pair.cc:456] op.nbytes. 300 vs 4"), "rank"),
        (RuntimeError("Connection reset by peer"), "rank"),
        (BrokenPipeError(32, "Broken pipe"), "rank"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_torch_raises_is_told_apart_by_type_and_place(error: Exception, expected: str) -> None:
    """What user code raises is its own, whatever it says."""
    if not isinstance(error, BrokenPipeError):
        assert origin(by_torch(error)) == expected
    assert origin(caught(lambda: fail(error.with_traceback(None)))) == "rank"


class Picky(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        fail(RuntimeError(CLOSED))


def test_an_error_of_user_code_within_a_backward_pass_or_of_an_operation_is_its_own() -> None:
    inputs = torch.ones(2, requires_grad=True)
    assert origin(caught(lambda: Picky.apply(inputs).sum().backward())) == "rank"
    (inputs * 2).sum().backward()
    inputs.register_hook(lambda gradient: fail(RuntimeError(LATE)))
    assert origin(caught(lambda: (inputs * 2).sum().backward())) == "rank"
    assert origin(caught(lambda: torch.ones(2, 3) @ torch.ones(2, 3))) == "rank"
    error = caught(lambda: dist.TCPStore("127.0.0.1", 1, is_master=False, timeout=timedelta(milliseconds=100)))
    assert (isinstance(error, dist.DistNetworkError), origin(error)) == (True, "rank"), "a store of user code"


def test_what_is_raised_from_a_lost_peer_is_one() -> None:
    def constructor(cause: BaseException) -> None:
        raise LookupError("no model") from cause

    error = KeyError("mine")
    error.__cause__ = error
    assert origin(caught(lambda: constructor(by_torch(RuntimeError(CLOSED))))) == "lost_peer"
    assert origin(caught(lambda: fail(error))) == "rank"


def test_memory_that_user_code_speaks_of_is_not_ours() -> None:
    for words in ("the GPU server is out of memory", "can't allocate memory", "CUDNN_STATUS_ALLOC_FAILED"):
        assert not is_out_of_memory(caught(lambda words=words: fail(RuntimeError(words))))
        assert is_out_of_memory(by_torch(RuntimeError(words)))
    for error in (MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")):
        assert is_out_of_memory(error)
    assert is_out_of_memory(caught(lambda: nn.Linear(10**7, 10**7)))
    assert not is_out_of_memory(caught(lambda: torch.ones(2, 3) @ torch.ones(2, 3)))
    assert not is_out_of_memory(ValueError("out of memory"))

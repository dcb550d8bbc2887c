"""One process, one rank: what it reports, replaying it by hand, and the load of its node."""

import os
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import toys

import pipeline
from pipeline.protocol.events import AnyEvent, Failed, Finished, SystemMetrics, Warned
from pipeline.protocol.trial import Rank, Trial
from pipeline.training.matmul_precision import set_exact_convolutions
from pipeline.worker import main as worker
from pipeline.worker import system_metrics
from pipeline.worker.system_metrics import system_sampled


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


def test_code_that_sets_another_precision_is_told() -> None:
    outbox = toys.Kept()
    worker.run(
        toys.trial(train={"matmul_precision": "highest"}, model={"_target_": "toys.tf32_model"}),
        rank=Rank(),
        outbox=outbox,
    )
    (told,) = [event.message for event in outbox.events if isinstance(event, Warned)]
    assert told.startswith("train.matmul_precision is highest, but code of the experiment sets high, which is used")
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_model_that_sets_tf32_by_the_newer_api_is_trained() -> None:
    """`torch.get_float32_matmul_precision` raises from then on."""
    outbox = toys.Kept()
    worker.run(toys.trial(model={"_target_": "toys.tf32_model_by_backend"}), rank=Rank(), outbox=outbox)
    (end,) = [event for event in outbox.events if isinstance(event, Finished)]
    assert end.result.matmul_precision == "high"
    assert torch.get_float32_matmul_precision() == "highest"
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # after which `torch.backends.cudnn.flags` raises
    with set_exact_convolutions(enabled=False):
        assert not torch.backends.cudnn.enabled
    assert torch.backends.cudnn.enabled
    torch.backends.cudnn.conv.fp32_precision = "tf32"


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
        assert failed.error.endswith("no access to ${oc.env:LAB_HOST}/x")
        assert "hunter2" not in failed.model_dump_json()


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


def test_the_rank_that_torchrun_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker.rank_from_environment() == Rank(node=os.uname().nodename)
    for name, value in {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    rank = worker.rank_from_environment()
    assert (rank.rank, rank.local_rank, rank.world_size, rank.local_world_size) == (5, 1, 8, 4)


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


def sampled(rank: Rank, *, count: int = 1) -> list[SystemMetrics]:
    outbox = Waiting(count)
    with system_sampled(rank, outbox):
        assert outbox.enough.wait(timeout=30)
    return [event for event in outbox.events if isinstance(event, SystemMetrics)]


def test_the_load_of_a_node_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_metrics, "INTERVAL_SECONDS", 0.05)
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
    with system_sampled(Rank(), outbox):
        pass
    (event,) = outbox.events
    assert isinstance(event, SystemMetrics)
    assert "system/cpu_utilization_percentage" in {point.name for point in event.points}


def test_several_nodes_are_told_apart() -> None:
    (event, *_) = sampled(Rank(rank=2, world_size=4, local_world_size=2, node="node-1"))
    assert all(point.name.startswith("system/node-1/") for point in event.points)


def test_a_gpu_that_does_not_tell_its_load_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that is shared: the driver says "not supported"."""

    def unsupported(*_: object) -> Any:
        raise system_metrics.pynvml.NVMLError(system_metrics.pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(system_metrics, "_gpus", lambda: [object()])
    monkeypatch.setattr(system_metrics.pynvml, "nvmlDeviceGetUtilizationRates", unsupported)
    (event, *_) = sampled(Rank())
    assert any(point.name == "system/cpu_utilization_percentage" for point in event.points)


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

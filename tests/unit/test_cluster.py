"""A Ray cluster: its address, the room on its nodes, the code that it gets, and how lost workers are told."""

# promise: an existing Ray cluster; several nodes

import importlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import toys
from projects import project
from ray.exceptions import RayActorError
from ray.train import ControllerError, WorkerGroupError

from pipeline.errors import ResourceError, UsageError
from pipeline.experiment.schema import Parallel
from pipeline.launch import cluster, ray
from pipeline.launch.base import Session
from pipeline.protocol.trial import Trial

JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"


class Nodes:
    """What Ray says of its nodes: cores of each, what is free of them together, and labels."""

    def __init__(self) -> None:
        self.cores: list[float] = [2, 2]
        self.free: float | None = None
        self.labels: dict[str, str] = {}

    def records(self) -> list[dict[str, Any]]:
        place = {"NodeManagerHostname": "n", "NodeManagerAddress": "10.0.0.2", "Labels": self.labels}
        return [{"Alive": True, "Resources": {"CPU": cores} if cores else {}, **place} for cores in self.cores]

    def total(self) -> dict[str, float]:
        return {"CPU": sum(self.cores)}

    def available(self) -> dict[str, float]:
        return {"CPU": sum(self.cores) if self.free is None else self.free}


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    nodes = Nodes()
    monkeypatch.setattr(cluster, "connected", lambda *_, **__: nullcontext())
    monkeypatch.setattr(cluster, "_is_reachable", lambda _: True)
    monkeypatch.setattr(cluster.ray, "nodes", nodes.records)
    monkeypatch.setattr(cluster.ray, "cluster_resources", nodes.total)
    monkeypatch.setattr(cluster.ray, "available_resources", nodes.available)
    monkeypatch.setattr(cluster, "_POLL_S", 0.0)
    monkeypatch.setattr(cluster, "_BRIEF_S", 0.0)
    return nodes


def trial(count: int, *, cores: int = 1, **parallel: object) -> Trial:
    return toys.trial(parallel=parallel).model_copy(update={"workers": count, "cpus_per_worker": cores})


@pytest.mark.parametrize(
    ("address", "refused"),
    [
        ("ray://head:10001", r"Ray Client is not supported\. Send .* ray job submit --address .* with HOST:6379"),
        ("http://head:8265", r"is the address of a dashboard\. To join a cluster, use HOST:6379\."),
    ],
)
def test_other_ways_to_a_cluster_are_refused_by_name(address: str, refused: str) -> None:
    with pytest.raises(UsageError, match=refused), cluster.connected(address, verbose=False):
        pass


def test_a_leftover_address_is_named_where_its_cluster_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://10.1.1.1")
    for address, noted in (("http://10.1.1.1", True), ("http://10.1.1.2", False)):
        with pytest.raises(UsageError) as caught, cluster.connected(address, verbose=False):
            pass
        assert ("RAY_ADDRESS=http://10.1.1.1 names this cluster." in caught.value.told) == noted


@pytest.mark.parametrize(
    ("wanted", "running", "free", "room"),
    [
        (trial(2), None, 0, 4),
        (trial(2, cores=2), None, 0, 2),
        (trial(2, cores=3), None, 4, 0),  # none fits on a single node
        (trial(2, placement="strict_spread"), None, 0, 2),
        (trial(2), 0, 3, 3),
        (trial(2), 2, 1, 3),
        (trial(2), 4, 3, 4),  # what other jobs have just freed
    ],
)
def test_each_worker_needs_a_single_node(
    nodes: Nodes, wanted: Trial, running: int | None, free: float, room: int
) -> None:
    nodes.free = free
    assert cluster.count_room(wanted, running=running) == room


def test_no_node_is_large_enough(nodes: Nodes) -> None:
    what = r"no node of the Ray cluster is large enough for a worker with 4 CPU: n \(10\.0\.0\.2\) has 2 CPU; "
    with pytest.raises(ResourceError, match=what):
        cluster.find_resources("10.0.0.1:6379", Parallel(cpus_per_worker=4))


def test_a_managed_cluster_may_have_no_node_yet(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's placement of the workers asks for nodes, also for the least number of an elastic training."""
    nodes.labels, nodes.cores = {"ray.io/node-group": "headgroup"}, [0.0]
    there = cluster.find_resources("10.0.0.1:6379", Parallel())
    assert (there.cpus, there.nodes, there.is_autoscaled) == (0, 1, True)
    launcher = ray.Launcher(Session(folder=Path(), receive=lambda _: None, parallel=Parallel()))
    assert launcher.capacity(trial(2, workers=[2, 4])) == 2
    nodes.labels = {}
    assert launcher.capacity(trial(2, workers=[2, 4])) == 0


def test_a_run_that_waits_for_room_says_so_once_unless_its_workers_can_never_fit(nodes: Nodes) -> None:
    warnings: list[str] = []
    nodes.free = 1
    cluster.await_room(trial(2), may_come=False, warn=warnings.append)
    assert warnings == [
        "waiting up to 600 s (parallel.start_timeout_s): requested 2 workers with 1 CPU each. The Ray cluster has "
        "4 CPU. Room for 1 worker is free now."
    ]
    with pytest.raises(ResourceError, match=r"has 4 CPU\. Its nodes have room for 4 workers\."):
        cluster.await_room(trial(5), may_come=False, warn=pytest.fail)
    cluster.await_room(trial(5), may_come=True, warn=warnings.append)  # nodes may come
    assert len(warnings) == 2


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project as generated ones are, with its package in src/, started from one of its folders."""
    folder = project(tmp_path / "project", tracked=False)
    (folder / "src").mkdir()
    (folder / "lab.py").rename(folder / "src" / "lab_src.py")
    (folder / "pyproject.toml").write_text('[tool.pipeline]\npackages = ["lab_src"]\n')
    (folder / "experiments").mkdir()
    monkeypatch.syspath_prepend(folder / "src")
    monkeypatch.chdir(folder / "experiments")
    monkeypatch.delenv(JOB, raising=False)
    importlib.invalidate_caches()
    return folder


def test_the_project_is_sent_and_found_there(here: Path) -> None:
    code = cluster.code_for_nodes()
    assert code["working_dir"] == str(here)
    assert {"/runs", ".env", "/.git"} <= set(code["excludes"])
    assert cluster.import_paths(is_sent=True) == ("src",)


def test_code_is_not_sent_twice_nor_without_a_project(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JOB, '{"runtime_env": {"working_dir": "gcs://package.zip"}}')
    assert cluster.code_for_nodes() == {}  # it came with the job
    assert cluster.import_paths(is_sent=False) == (str(here / "src"),)
    monkeypatch.delenv(JOB)
    (here / "pyproject.toml").write_text("[tool.pipeline]\n")
    assert (cluster.code_for_nodes(), cluster.import_paths(is_sent=False)) == ({}, ())


def test_a_node_with_other_versions_has_no_worker() -> None:
    here = ray.find_versions()
    ray._check_node("node1", versions={**here, "ddp-pipeline": None}, shared={})  # started from a source folder
    with pytest.raises(ResourceError) as error:
        ray._check_node("node1", versions={**here, "torch": "1.0"}, shared={})
    assert str(error.value) == (
        f"node1 can't run workers: it has torch {here['torch']}, and the driver has 1.0. On that node, pip install "
        "torch==1.0"
    )


@pytest.mark.parametrize("key", ["tracking.directory", "checkpoint.directory"])
def test_a_node_without_the_shared_folder_has_no_worker(key: str, tmp_path: Path) -> None:
    versions = ray.find_versions()
    ray._check_node("node1", versions=versions, shared={key: str(tmp_path)})
    refused = rf"node1 can't run workers: {tmp_path}/a of the driver's .* Set {key} to a folder that all nodes share"
    with pytest.raises(ResourceError, match=refused):
        ray._check_node("node1", versions=versions, shared={key: f"{tmp_path}/a"})


def test_a_worker_that_cannot_connect_ends_the_run() -> None:
    """It isn't lost: on a restart, the firewall would still be there."""
    failures = {0: RuntimeError(), 1: ResourceError("can't connect to the driver")}
    with pytest.raises(ResourceError, match="can't connect"):
        ray._find_losses(WorkerGroupError("", failures), toys.trial(), silent={})
    assert ray._find_losses(RayActorError(), trial(2), silent={}).keys() == {0, 1}  # without its controller all are


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("the startup timed out after 600 seconds", r"\. Room for 4 workers was free within parallel\.start_timeout_s"),
        ("no such bundle", ": no such bundle"),
    ],
)
def test_workers_that_ray_cannot_start(nodes: Nodes, said: str, told: str) -> None:
    with pytest.raises(ResourceError, match=f"Ray could not start 5 workers with 1 CPU each{told}"):
        ray._find_losses(ControllerError(RuntimeError(said)), trial(5), silent={})


class HealthCheckFailed(Exception):
    def __init__(self, said: str) -> None:
        self.health_check_failure = RayActorError(error_msg=said)


@pytest.mark.parametrize(
    ("said", "how"),
    [
        ("The actor died because its node has died. Node Id: 1", "its node ended or is unreachable"),
        ("The actor died because its worker process has died.", "its process was killed (out of memory?) or crashed"),
    ],
)
def test_a_dead_node_is_not_taken_for_a_killed_process(said: str, how: str) -> None:
    assert ray._describe_loss(HealthCheckFailed(said)) == how

"""A run joins a Ray cluster that is there already, and leaves it as it was."""

# promise: an existing Ray cluster; several nodes
# promise: a sweep on a shared cluster is sized by what is free, a lack of room is no result

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from swept import Folder, section

from pipeline.protocol.events import Finished, RunClosed, Started
from pipeline.record import journal

RAY = Path(sys.executable).with_name("ray")
MLP = Path(__file__).parents[3] / "experiments" / "mlp.yaml"
CPUS = 2
OTHER_JOB = """
import sys, time
from pathlib import Path

import ray

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")


@ray.remote(num_cpus=1)
def hold(path):
    path.with_suffix(".held").touch()
    while not path.exists():
        time.sleep(0.1)


ray.get([hold.remote(Path(path)) for path in sys.argv[2:]])
"""
"""Program that occupies a core of the cluster for each file, until the file exists."""


class Cluster:
    """The head node of a cluster, all of it in one process tree of ours."""

    def __init__(self, folder: Path) -> None:
        with closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.environment = {
            **os.environ,
            "RAY_AUTH_MODE": "disabled",  # else head and driver need the same token in the home directory
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        self.environment.pop("RAY_ADDRESS", None)
        line = [RAY, "start", "--head", "--block", "--node-ip-address=127.0.0.1", "--include-dashboard=false"]
        line += [f"--port={self.address.partition(':')[2]}", f"--num-cpus={CPUS}", f"--temp-dir={folder}"]
        self.process = subprocess.Popen(
            [*line, "--object-store-memory=100000000"],
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def answers(self) -> bool:
        health = [RAY, "health-check", "--address", self.address]
        return subprocess.run(health, env=self.environment, capture_output=True, check=False).returncode == 0

    def processes(self) -> set[psutil.Process]:
        """Those of the cluster itself: not the workers that come and go."""
        everyone = psutil.Process(self.process.pid).children(recursive=True)
        return {process for process in everyone if process.name() in ("gcs_server", "raylet")}

    def stop(self) -> None:
        head = psutil.Process(self.process.pid)
        everyone = [head, *head.children(recursive=True)]
        for process in everyone:
            process.terminate()
        _, alive = psutil.wait_procs(everyone, timeout=5)
        for process in alive:
            process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # a socket's path must be short
    cluster = Cluster(folder)
    try:
        deadline = time.monotonic() + 60
        while not (cluster.answers() and len(cluster.processes()) == 2):  # the head answers before its raylet is there
            assert time.monotonic() < deadline, "the cluster doesn't answer"
            assert cluster.process.poll() is None, "the cluster has ended"
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def run(
    cluster: Cluster, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> Callable[..., tuple[int, str, str]]:
    """``pipeline run`` on the experiment; exit code and what it printed."""

    def go(*overrides: str) -> tuple[int, str, str]:
        process = start(
            *("run", MLP, "--no-baseline", "parallel.launcher=ray", "train.epochs=1", "tracking.log_model=false"),
            *overrides,
            cwd=tmp_path,
            env=cluster.environment,
        )
        stdout, stderr = process.communicate(timeout=150)
        return process.returncode, stdout, stderr

    return go


def test_a_run_joins_it_and_leaves_it_alive(cluster: Cluster, run: Any, tmp_path: Path) -> None:
    before = cluster.processes()

    code, stdout, stderr = run(f"parallel.address={cluster.address}")

    assert code == 0, stdout + stderr
    assert "warning" not in stderr
    (folder,) = (tmp_path / "runs").iterdir()
    events = list(journal.read(folder / journal.FILE_NAME))
    assert len(next(event for event in events if isinstance(event, Started)).devices) == CPUS
    assert [event.result.steps for event in events if isinstance(event, Finished)] == [23]
    assert isinstance(events[-1], RunClosed)
    assert events[-1].status == "FINISHED"
    assert cluster.answers()
    assert len(before) == 2
    assert cluster.processes() == before


def test_a_cluster_that_is_too_small_is_refused(cluster: Cluster, run: Any, tmp_path: Path) -> None:
    code, _, stderr = run(f"parallel.address={cluster.address}", "parallel.workers=3")

    assert code == 3
    assert "3 workers" in stderr
    assert cluster.address in stderr
    assert "Traceback" not in stderr
    assert not (tmp_path / "runs").exists()
    assert cluster.answers()


def test_more_workers_than_cores_are_refused_at_once(run: Any) -> None:
    """On a cluster that the run starts itself, within the 150 seconds that `run` waits for cores."""
    code, _, stderr = run("parallel.strategy=ddp", "parallel.workers=1024", "train.global_batch_size=1024")

    assert code == 3
    assert "1024 workers" in stderr
    assert "Use at most" in stderr


def test_no_cluster_at_the_address_is_refused(run: Any, tmp_path: Path) -> None:
    """Within the 150 seconds that `run` waits."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        code, _, stderr = run(f"parallel.address={address}")  # bound, but nobody listens

    assert code == 3
    assert f"no Ray cluster answers at {address}" in stderr
    assert "Traceback" not in stderr
    assert not (tmp_path / "runs").exists()


def test_the_environment_names_the_cluster_too(cluster: Cluster, run: Any) -> None:
    cluster.environment["RAY_ADDRESS"] = cluster.address
    try:
        code, _, stderr = run("parallel.workers=3")
    finally:
        del cluster.environment["RAY_ADDRESS"]

    assert code == 3
    assert cluster.address in stderr


@pytest.mark.timeout(900)
def test_a_sweep_waits_for_room_that_other_jobs_occupy(
    cluster: Cluster, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    """Without any room it ends, to be resumed."""
    folder, files = Folder(tmp_path), [tmp_path / "first", tmp_path / "second"]
    other = subprocess.Popen([sys.executable, "-c", OTHER_JOB, cluster.address, *files], env=cluster.environment)

    def sweep(*more: str) -> subprocess.Popen[str]:
        rates = section(parameters={"optimizer.lr": {"grid": [0.1, 0.05]}}, concurrent=2)
        options = ["parallel.workers=1", "parallel.cpus_per_worker=1", "parallel.start_timeout_s=1", "train.epochs=120"]
        line = ("sweep", MLP, f"parallel.address={cluster.address}", "parallel.launcher=ray", *options, rates, *more)
        return start(*line, cwd=tmp_path, env=cluster.environment)

    try:
        await_files([file.with_suffix(".held") for file in files])
        stdout, stderr = (process := sweep()).communicate(timeout=240)
        assert process.returncode == 3, stdout + stderr
        assert "Room for 0 workers was free within parallel.start_timeout_s (1 s)." in stderr
        assert "trials that did not end: 1, 2. To continue them, use --resume." in stderr
        assert "0 of 2 CPU free now" in " ".join((stdout + stderr).split())
        assert {*folder.states.values()} == {"interrupted"}

        files[0].touch()  # one core: the second trial waits until the first one has ended
        process = sweep("--resume", "parallel.start_timeout_s=200")
        stdout, stderr = process.communicate(timeout=240)
    finally:
        other.kill()
        other.wait()

    assert process.returncode == 0, stdout + stderr
    assert [folder.of(trial, RunClosed)[-1].status for trial in (1, 2)] == ["FINISHED", "FINISHED"]
    assert "Traceback" not in stdout + stderr


def await_files(paths: list[Path]) -> None:
    deadline = time.monotonic() + 60
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"missing: {paths}"
        time.sleep(0.1)


def test_pairs_are_trained_on_the_cluster(
    cluster: Cluster, start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    options = ("parallel.strategy=single", "parallel.workers=1", "parallel.cpus_per_worker=1", "train.epochs=1")
    words = ("compare", MLP, "--vary", "optimizer.lr=0.1,1e-6", "--seeds", "2", "--address", cluster.address, *options)
    stdout, stderr = start(*words, "--concurrent", "2", cwd=tmp_path).communicate(timeout=240)
    assert "\nRESULT   B is worse than A: validation/accuracy" in stdout, stdout + stderr

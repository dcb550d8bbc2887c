"""An elastic training continues with fewer workers when a node dies, and stays the same."""

# promise: `workers: [1, 4]` on Ray nodes that die

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from command import line_of
from job import PATIENCE_S, Job
from stores import free_port

from pipeline.protocol.events import CheckpointSaved, Resumed, RunClosed, Started, Warned
from pipeline.results import record

pytestmark = pytest.mark.timeout(1200)

RAY = Path(sys.executable).with_name("ray")
STEPS = 1200  # Slow ones, until the test lets them run
TRAINING = [
    "data={_target_: lab.points, samples: 4800}",
    "train={epochs: 4, global_batch_size: 16, precision: fp64, log_every_steps: 1}",
    "checkpoint.every_steps=10",
    "benchmark={warmup_steps: 1, steps: 2, windows: 2}",
]


class Cluster:
    """Ray nodes of one core each on this machine, each of them a process tree that can be killed."""

    def __init__(self, code: Path) -> None:
        """Nodes have the user's ``code``."""
        self.folder = Path(tempfile.mkdtemp(prefix="re", dir="/tmp"))  # a socket's path must be short
        self.address = f"127.0.0.1:{free_port()}"
        own = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_worker_prestart": "0"}
        own["RAY_NUM_REDIS_GET_RETRIES"] = "100"  # seconds; a busy machine starts a head slowly
        self.environment = {**os.environ, **own, "PYTHONPATH": str(code)}
        self.environment.pop("RAY_ADDRESS", None)
        self.nodes: list[subprocess.Popen[bytes]] = []

    def add(self) -> None:
        role = [f"--address={self.address}"]
        if not self.nodes:
            port = self.address.partition(":")[2]
            role = ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={self.folder}"]
        line = [RAY, "start", "--block", "--node-ip-address=127.0.0.1", "--num-cpus=1", *role]
        line += ["--object-store-memory=100000000"]
        with (self.folder / f"node{len(self.nodes)}.log").open("w") as log:
            node = subprocess.Popen(line, env=self.environment, stdout=log, stderr=log, cwd=self.folder)
        self.nodes.append(node)

    def await_node(self, number: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while "Ray runtime started" not in (log := (self.folder / f"node{number}.log").read_text()):
            assert self.nodes[number].poll() is None, log
            assert time.monotonic() < deadline, log
            time.sleep(0.1)

    def await_nodes(self, number: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        code = f"import ray; ray.init({self.address!r}); print('nodes', sum(n['Alive'] for n in ray.nodes()))"
        while True:
            line = [sys.executable, "-c", code]
            asked = subprocess.run(line, env=self.environment, capture_output=True, text=True, check=False)
            if f"nodes {number}" in asked.stdout:
                return
            assert time.monotonic() < deadline, asked
            time.sleep(0.5)

    def kill(self, node: int) -> None:
        """SIGKILL all that runs on a node."""
        top = psutil.Process(self.nodes[node].pid)
        everyone = [top, *top.children(recursive=True)]
        for process in everyone:
            process.kill()
        psutil.wait_procs(everyone, timeout=10)
        self.nodes[node].wait()

    def end(self) -> None:
        for log in sorted(self.folder.glob("node*.log")):
            print(log.name, log.read_text())  # noqa: T201 - shown when the test fails
        for number in reversed(range(len(self.nodes))):
            if self.nodes[number].poll() is None:
                self.kill(number)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def cluster(project: Path) -> Iterator[Cluster]:
    cluster = Cluster(project)
    try:
        for number in range(2):
            cluster.add()
            cluster.await_node(number)
        yield cluster
    finally:
        cluster.end()


class Run(Job):
    """``pipeline run`` as a process, which is slow until a file is there."""

    def __init__(self, cwd: Path, folder: Path) -> None:
        super().__init__(cwd, runs=folder / "runs")
        self.release = folder / "release"

    def sizes(self) -> list[int]:
        return [len(event.devices) for event in self.all_of(Started)]

    def trains_with(self, workers: int) -> bool:
        """Whether the latest attempt has that many workers and has come to new steps."""
        measured = self.series("throughput/workers")
        return self.sizes()[-1:] == [workers] and bool(measured) and measured[-1][1] == workers


def line(folder: Path, *overrides: str) -> list[str]:
    own = [f"tracking.uri=sqlite:///{folder}/mlflow.db", f"tracking.directory={folder}/runs"]
    own += [f"model={{_target_: lab.Paced, ms: 1000, release: {folder}/release}}"]
    folder.mkdir()
    return ["run", "lab.yaml", "--no-baseline", *TRAINING, *own, *overrides]


def test_a_node_dies(cluster: Cluster, repository: Path, tmp_path: Path, command: Any) -> None:
    parallel = ["parallel.launcher=ray", "parallel.strategy=ddp", f"parallel.address={cluster.address}"]
    elastic, alone = tmp_path / "elastic", tmp_path / "alone"
    arguments = line(elastic, *parallel, "parallel.workers=[1, 2]", "parallel.start_timeout_s=120")
    with Run(repository, elastic) as run:
        run.start(line_of(*arguments), environments=[cluster.environment])
        assert command(*line(alone, "model.ms=0")).code == 0
        expected = [value for _, value in Run(repository, alone).losses]
        run.wait_for(lambda: run.trains_with(2) and run.all_of(CheckpointSaved), what="a checkpoint of two workers")
        cluster.kill(1)
        run.wait_for(lambda: run.trains_with(1), what="steps of one worker")
        run.release.touch()
        (ended,) = run.ended()

    assert ended.code == 0, ended.output
    assert run.sizes() == [2, 1]
    losses = run.losses
    assert [step for step, _ in losses] == list(range(1, STEPS + 1))
    assert [value for _, value in losses] == pytest.approx(expected, rel=0, abs=1e-12)
    told = [event.message for event in run.all_of(Warned)]
    (shrunk,) = (event.step for event in run.all_of(Resumed))
    assert f"Resuming with 1 of 2 workers from step {shrunk}." in told
    assert isinstance(run.events[-1], RunClosed)
    assert "MLflow refuses" not in ended.output
    result = record.read(run.folder)
    assert result is not None
    assert result.headline[-2].startswith("1 worker (ddp): ")
    assert result.headline[-1].startswith("The number of workers changed: 2, then 1.")

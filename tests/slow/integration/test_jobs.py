"""Runs as jobs: of a Ray head with token authentication, on loopback, and of a stand-in for Slurm."""

# promise: a run as a Ray job stops with a checkpoint and is resumed
# promise: the script for Slurm

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
import requests
from mlflow import MlflowClient
from slurm import SCRIPT, Slurm
from stores import free_port

from pipeline.protocol.events import CheckpointSaved, Event, Metrics, Resumed, RunClosed
from pipeline.record import journal

pytestmark = pytest.mark.timeout(900)

BIN = Path(sys.executable).parent
TOKEN = "4711" * 8
PATIENCE_S = 400
ATTEMPTS = 3  # At starting a head: Ray gives up after half a minute where others use the processors
E = TypeVar("E", bound=Event)


class Head:
    """The head of a cluster, all of it in one process tree of ours; its home is a folder of the tests."""

    def __init__(self, folder: Path, home: Path) -> None:
        port, dashboard, agent = (free_port() for _ in range(3))
        self.url = f"http://127.0.0.1:{dashboard}"
        environment = {
            **os.environ,
            "HOME": str(home),
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_enable_worker_prestart": "0",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        }
        environment.pop("RAY_ADDRESS", None)
        line = [BIN / "ray", "start", "--head", "--block", "--node-ip-address=127.0.0.1", "--include-dashboard=true"]
        line += [f"--port={port}", f"--dashboard-port={dashboard}", "--dashboard-host=127.0.0.1", "--num-cpus=2"]
        line += [f"--temp-dir={folder}", "--object-store-memory=100000000", f"--dashboard-agent-listen-port={agent}"]
        self.log = folder / "head.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(line, env=environment, stdout=log, stderr=log)

    def is_ready_or_has_ended(self) -> bool:
        if self.process.poll() is not None:
            return True
        if "Ray runtime started" not in self.log.read_text():
            return False
        with suppress(requests.RequestException):
            headers = {"Authorization": f"Bearer {TOKEN}"}
            return requests.get(f"{self.url}/api/jobs/", headers=headers, timeout=5).status_code == 200
        return False

    def stop(self) -> None:
        everyone = self._tree()
        for process in everyone:
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        _, alive = psutil.wait_procs(everyone, timeout=5)
        for process in alive:
            process.kill()
        self.process.wait()

    def _tree(self) -> list[psutil.Process]:
        try:
            head = psutil.Process(self.process.pid)
            return [head, *head.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def wait_for(condition: Callable[[], object], *, what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    for attempt in range(ATTEMPTS):
        folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # a socket's path must be short
        head = Head(folder, tmp_path_factory.mktemp("home"))
        try:
            wait_for(head.is_ready_or_has_ended, what="the head doesn't answer")
            if head.process.poll() is None:
                yield head
                return
            assert attempt < ATTEMPTS - 1, head.log.read_text()
        finally:
            head.stop()
            shutil.rmtree(folder, ignore_errors=True)


def test_ray_job_stops_with_a_checkpoint_and_is_resumed(head: Head, repository: Path, tmp_path: Path) -> None:
    store, release, runs = f"sqlite:///{tmp_path / 'mlflow.db'}", tmp_path / "release", tmp_path / "runs"
    variables = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_ADDRESS": head.url}
    pipeline = [BIN / "python", "-m", "pipeline", "run", "lab.yaml", "parallel.launcher=ray", f"tracking.uri={store}"]
    pipeline += [f"tracking.directory={runs}", f"model={{_target_: lab.Paced, release: {release}, ms: 300}}"]
    pipeline += ["train.epochs=10", "--no-baseline"]

    def ray_job(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        line = [BIN / "ray", "job", *arguments]
        return subprocess.run(line, cwd=repository, env=variables, capture_output=True, text=True, check=False)

    def submit(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        wait = '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "120"}}'
        return ray_job("submit", "--working-dir", ".", "--runtime-env-json", wait, *arguments)

    def events(kind: type[E]) -> list[E]:
        paths = runs.glob(f"*/{journal.FILE_NAME}")
        return [event for path in paths for event in journal.read(path) if isinstance(event, kind)]

    sent = submit("--no-wait", "--submission-id", "lab-1", "--", *pipeline)
    assert sent.returncode == 0, sent.stdout + sent.stderr
    wait_for(lambda: events(Metrics), what="training doesn't start")
    stopped = ray_job("stop", "lab-1")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert [event.status for event in events(RunClosed)] == ["KILLED"]
    last = max(event.step for event in events(Metrics))
    assert max(event.step for event in events(CheckpointSaved)) == last, "not that of an epoch"
    release.touch()
    resumed = submit("--", *pipeline, "--resume")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert [event.status for event in events(RunClosed)] == ["KILLED", "FINISHED"]
    assert [event.step for event in events(Resumed)] == [last]
    client = MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name("lab").experiment_id])
    assert run.info.status == "FINISHED"


def test_sbatch_script_trains_on_a_stand_in_for_slurm_is_requeued_and_resumed(repository: Path, tmp_path: Path) -> None:
    """Its commands start everything on this machine."""
    number = free_port()
    slurm = Slurm(tmp_path / "slurm", job=number, cwd=repository, tasks=2)
    slurm.environment["PATH"] = f"{tmp_path / 'slurm' / 'bin'}:{BIN}:{os.environ['PATH']}"
    release = tmp_path / "release"
    arguments = ["lab.yaml", f"model={{_target_: lab.Paced, release: {release}, ms: 300}}", "train.epochs=10"]
    arguments += ["train.log_every_steps=1", "parallel.strategy=ddp", "--no-baseline"]

    def events(kind: type[E]) -> list[E]:
        paths = repository.glob(f"runs/slurm-{number}/*/{journal.FILE_NAME}")
        return [event for path in paths for event in journal.read(path) if isinstance(event, kind)]

    with slurm.start(SCRIPT, *arguments) as first:
        wait_for(lambda: events(Metrics) or first.poll() is not None, what="training doesn't begin")
        slurm.near_time_limit(first, SCRIPT)
        output, _ = first.communicate()
    assert first.returncode == 143, output
    assert slurm.requeued == [str(number)]
    stopped_at = max(event.step for event in events(Metrics))
    assert max(event.step for event in events(CheckpointSaved)) == stopped_at
    release.touch()
    with slurm.start(SCRIPT, *arguments) as second:
        output, _ = second.communicate()
    assert second.returncode == 0, output
    assert slurm.requeued == [str(number)]
    assert [event.step for event in events(Resumed)] == [stopped_at]
    assert max(event.step for event in events(Metrics)) > stopped_at

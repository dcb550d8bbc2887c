"""Runs sent to a Ray cluster as jobs: a real head with its dashboard and token authentication, on loopback."""

# promise: `submit` to a cluster: the job outlives the command

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
from slurm import Slurm
from stores import free_port

from pipeline.protocol.events import AnyEvent, CheckpointSaved, Event, Metrics, Resumed, RunClosed
from pipeline.recording.journal import journal

pytestmark = pytest.mark.timeout(900)

BIN = Path(sys.executable).parent
TOKEN = "4711" * 8
PLANTED = "planted-value-of-a-variable"
PATIENCE_S = 400
ATTEMPTS = 3
"""At starting a head: Ray gives up after half a minute where others use the processors."""
E = TypeVar("E", bound=Event)
Shell = Callable[..., subprocess.CompletedProcess[str]]


class Head:
    """The head of a cluster, all of it in one process tree of ours; its home is a folder of the tests."""

    def __init__(self, folder: Path, home: Path) -> None:
        port, dashboard, agent = (free_port() for _ in range(3))
        self.url = f"http://127.0.0.1:{dashboard}"
        self.runs = home / "pipeline-runs"
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

    def has_trained(self) -> bool:
        return any(isinstance(event, Metrics) for event in self.events())

    def _tree(self) -> list[psutil.Process]:
        try:
            head = psutil.Process(self.process.pid)
            return [head, *head.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def events(self) -> list[AnyEvent]:
        """Those of the only run."""
        return [event for path in self.runs.glob(f"lab/*/{journal.FILE_NAME}") for event in journal.read(path)]


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


@pytest.fixture
def shell(repository: Path) -> Shell:
    """A command line in the repository, with the cluster's token."""
    variables = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "PLANTED": PLANTED}
    variables["PATH"] = f"{BIN}:{os.environ['PATH']}"
    variables.pop("RAY_ADDRESS", None)

    def run(line: str, **more: str) -> subprocess.CompletedProcess[str]:
        environment = {**variables, **more}
        return subprocess.run(
            ["bash", "-c", line], cwd=repository, env=environment, capture_output=True, text=True, check=False
        )

    return run


def test_job_outlives_its_sender_stops_with_a_checkpoint_and_is_resumed_into_the_same_folder(
    head: Head, shell: Shell, tmp_path: Path
) -> None:
    """The commands for the job are those that ``submit`` has printed."""
    store, release = f"sqlite:///{tmp_path / 'mlflow.db'}", tmp_path / "release"
    line = f"pipeline submit lab.yaml tracking.uri={store} 'model={{_target_: lab.Paced, release: {release}, ms: 300}}'"
    line += f" train.epochs=10 --no-baseline --address {head.url}"
    sent = shell(f"{line} --env PLANTED")
    assert sent.returncode == 0, sent.stderr
    assert "sending 3 files" in sent.stderr
    assert "pipeline-runs/lab on the head" in sent.stderr
    follow, status, stop = (line for line in sent.stderr.splitlines() if line.startswith("ray job "))
    job = sent.stdout.strip()
    wait_for(head.has_trained, what="training doesn't start")
    assert f"Status for job '{job}': RUNNING" in shell(status).stdout

    assert shell(stop).returncode == 0
    events = head.events()
    assert [event.status for event in events if isinstance(event, RunClosed)] == ["KILLED"]
    last = max(event.step for event in events if isinstance(event, Metrics))
    assert max(event.step for event in events if isinstance(event, CheckpointSaved)) == last, "not that of an epoch"
    logs = shell(follow).stdout
    assert "step 1/" in logs
    assert f"Job '{job}' was stopped" in logs

    release.touch()
    resumed = shell(f"{line} --resume")
    assert resumed.returncode == 0, resumed.stderr
    follow = next(line for line in resumed.stderr.splitlines() if "job logs" in line)
    output = shell(follow).stdout
    assert f"Job '{resumed.stdout.strip()}' succeeded" in output
    assert len(list(head.runs.glob("lab/*"))) == 1
    events = head.events()
    assert [event.status for event in events if isinstance(event, RunClosed)] == ["KILLED", "FINISHED"]
    assert any(isinstance(event, Resumed) for event in events)
    assert PLANTED not in sent.stdout + sent.stderr + logs + output
    client = MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name("lab").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.metrics["validation/loss"] > 0


@pytest.mark.parametrize(("token", "said"), [("", "Authentication required"), ("wrong" * 8, "Authentication failed")])
def test_a_cluster_that_refuses_the_token_is_an_error(
    token: str, said: str, head: Head, shell: Shell, tmp_path: Path
) -> None:
    line = f"pipeline submit lab.yaml tracking.uri=http://tracking:5000 --address {head.url}"
    refused = shell(line, HOME=str(tmp_path), RAY_AUTH_TOKEN=token, RAY_AUTH_MODE="token" if token else "disabled")
    assert refused.returncode == 3
    assert said in refused.stderr
    assert "Set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN" in refused.stderr
    assert "wrong" * 8 not in refused.stderr


def test_address_is_read_from_the_environment_and_an_option_counts_more(head: Head, shell: Shell) -> None:
    line = "pipeline submit lab.yaml tracking.uri=http://tracking:5000 --env NOT_SET_ANYWHERE"
    for more in ({"RAY_ADDRESS": head.url}, {"RAY_ADDRESS": "10.0.0.1:6379"}):
        refused = shell(line if more["RAY_ADDRESS"] == head.url else f"{line} --address {head.url}", **more)
        assert refused.returncode == 2
        assert "NOT_SET_ANYWHERE is not set here" in refused.stderr


@pytest.mark.parametrize("launcher", ["ray", "srun", "torchrun"])
def test_sbatch_script_trains_on_a_stand_in_for_slurm_is_requeued_and_resumed(
    launcher: str, repository: Path, tmp_path: Path
) -> None:
    """Its commands start everything on this machine; with Ray, two nodes with one address."""
    number = free_port()
    slurm = Slurm(tmp_path / "slurm", job=number, cwd=repository, tasks=2 if launcher == "srun" else 1)
    slurm.environment |= {"PYTHON": sys.executable, "RAY_enable_worker_prestart": "0"}
    release = tmp_path / "release"
    overrides = [f"model={{_target_: lab.Paced, release: {release}, ms: 300}}", "train.epochs=10"]
    overrides += [
        "train.log_every_steps=1",
        "parallel.workers=2",
        "parallel.strategy=ddp",
        "parallel.cpus_per_worker=1",
    ]
    line = [sys.executable, "-m", "pipeline", "submit", "lab.yaml", *overrides, "--slurm", "--no-baseline"]
    line += ["--launcher", launcher, "--nodes", "2" if launcher == "ray" else "1"]
    made = subprocess.run(line, cwd=repository, capture_output=True, text=True, check=True)
    (job := tmp_path / "job.sbatch").write_text(made.stdout)

    def events(kind: type[E]) -> list[E]:
        paths = repository.glob(f"runs/slurm-{number}/*/{journal.FILE_NAME}")
        return [event for path in paths for event in journal.read(path) if isinstance(event, kind)]

    with slurm.start(job) as first:
        wait_for(lambda: events(Metrics) or first.poll() is not None, what="training doesn't begin")
        slurm.near_time_limit(first, job)
        output, _ = first.communicate()
    assert first.returncode == (1 if launcher == "torchrun" else 143), output
    assert slurm.requeued == [str(number)]
    assert not Path(f"/tmp/ray-{number}").exists()
    stopped_at = max(event.step for event in events(Metrics))
    assert max(event.step for event in events(CheckpointSaved)) == stopped_at
    release.touch()
    with slurm.start(job) as second:
        output, _ = second.communicate()
    assert second.returncode == 0, output
    assert slurm.requeued == [str(number)]
    assert [event.step for event in events(Resumed)] == [stopped_at]
    assert max(event.step for event in events(Metrics)) > stopped_at

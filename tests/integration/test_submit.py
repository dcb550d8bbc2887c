"""Runs sent to a Ray cluster as jobs: a real head with its dashboard and token authentication, on loopback."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar, cast

import aiohttp
import psutil
import pytest
import requests
from mlflow import MlflowClient
from slurm import Slurm

from pipeline.commands.submit import following
from pipeline.commands.submit.jobs import Job, Jobs
from pipeline.errors import ResourceError
from pipeline.protocol.events import AnyEvent, CheckpointSaved, Event, Metrics, Resumed, RunClosed
from pipeline.recording import journal

pytestmark = pytest.mark.timeout(900)

BIN = Path(sys.executable).parent
TOKEN = "4711" * 8
PLANTED = "planted-value-of-a-variable"
LAB = Path(__file__).parents[1] / "project"
PATIENCE_S = 400
ATTEMPTS = 3
"""At starting a head: Ray gives up after half a minute where others use the processors."""
E = TypeVar("E", bound=Event)
Pipeline = Callable[..., tuple[int, str, str]]
Start = Callable[..., subprocess.Popen[str]]


class Head:
    """The head of a cluster, all of it in one process tree of ours; its home is a folder of the tests."""

    def __init__(self, folder: Path, home: Path) -> None:
        port, dashboard, agent = _free_ports(3)
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


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


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
def repository(tmp_path: Path) -> Path:
    """The user's project as a git repository."""
    folder = Path(shutil.copytree(LAB, tmp_path / "project", ignore=shutil.ignore_patterns("__pycache__")))
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    subprocess.run(["git", "add", "."], cwd=folder, check=True)
    return folder


@pytest.fixture
def pipeline(command: Pipeline, repository: Path, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    """``pipeline ARGUMENTS`` in the repository, with the cluster's token."""
    monkeypatch.chdir(repository)
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return command


def test_job_outlives_its_sender_stops_with_a_checkpoint_and_is_resumed_into_the_same_folder(
    head: Head,
    pipeline: Pipeline,
    start: Start,
    tmp_path: Path,
) -> None:
    store, release = f"sqlite:///{tmp_path / 'mlflow.db'}", tmp_path / "release"
    experiment = ["lab.yaml", f"tracking.uri={store}", f"model={{_target_: lab.Paced, release: {release}, ms: 300}}"]
    experiment += ["train.epochs=10", "train.log_every_steps=1", "--no-baseline", "--env", "PLANTED"]
    address = ["--address", head.url]
    environment = {**os.environ, "PLANTED": PLANTED}
    sender = start("submit", *experiment, *address, cwd=tmp_path / "project", env=environment)
    assert sender.stdout is not None
    stdout = ""
    for line in sender.stdout:  # it is followed by default
        stdout += line
        if "step 1/" in line:
            break
    assert sender.poll() is None, (stdout, sender.communicate())
    assert head.has_trained()
    sender.kill()
    _, stderr = sender.communicate()
    assert "sending 3 files" in stderr
    assert "pipeline-runs/lab on the head" in stderr
    (job,) = json.loads(pipeline("status", "--json", *address)[1])
    assert (job["experiment"], job["status"], job["exit_code"]) == ("lab", "RUNNING", None)
    assert job["id"] in stdout

    code, shown, _ = pipeline("stop", job["id"], *address)
    assert (code, shown) == (0, f"{job['id']}: STOPPED\n")
    events = head.events()
    assert [event.status for event in events if isinstance(event, RunClosed)] == ["KILLED"]
    last = max(event.step for event in events if isinstance(event, Metrics))
    assert max(event.step for event in events if isinstance(event, CheckpointSaved)) == last, "not that of an epoch"
    code, logs, stderr = pipeline("logs", job["id"], "--follow", *address)
    assert code == 143
    assert "step 1/" in logs
    assert f"{job['id']}: STOPPED" in stderr
    assert pipeline("stop", job["id"], *address)[:2] == (0, f"{job['id']}: STOPPED\n"), "it has ended already"

    release.touch()
    code, output, stderr = pipeline("submit", *experiment[:-2], "--resume", *address)
    assert code == 0, output + stderr
    assert len(list(head.runs.glob("lab/*"))) == 1
    events = head.events()
    assert [event.status for event in events if isinstance(event, RunClosed)] == ["KILLED", "FINISHED"]
    assert any(isinstance(event, Resumed) for event in events)
    assert PLANTED not in stdout + logs + output + stderr + pipeline("status", "--json", *address)[1]
    _, table, _ = pipeline("status", *address)
    assert [line.split()[1:4] for line in table.splitlines()[1:]] == [
        ["lab", "STOPPED", "-"],
        ["lab", "SUCCEEDED", "0"],
    ]
    client = MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name("lab").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.metrics["validation/loss"] > 0


@pytest.mark.parametrize(
    ("token", "said"),
    [(None, "requires a token. Set RAY_AUTH_TOKEN"), ("wrong" * 8, "rejects the token. Set RAY_AUTH_TOKEN")],
)
def test_cluster_that_knows_us_not_is_an_error(
    token: str | None,
    said: str,
    head: Head,
    start: Start,
    tmp_path: Path,
) -> None:
    # In a process of its own: Ray reads a token once, and keeps one in the home directory once it has run here.
    environment = {**os.environ, "HOME": str(tmp_path), "RAY_AUTH_TOKEN": token or ""}
    if token is None:
        del environment["RAY_AUTH_TOKEN"]
    asking = start("status", "--address", head.url, cwd=tmp_path, env=environment)
    _, stderr = asking.communicate(timeout=PATIENCE_S)
    assert asking.returncode == 3
    assert said in stderr
    assert "wrong" * 8 not in stderr


@pytest.mark.parametrize("verb", ["status", "logs", "stop"])
def test_unknown_job_is_an_error(verb: str, head: Head, pipeline: Pipeline) -> None:
    code, _, stderr = pipeline(verb, "lab-20261121-000000-ffff", "--address", head.url)
    assert code == 2
    assert f"{head.url} has no job lab-20261121-000000-ffff" in stderr


def test_address_is_read_from_the_environment(head: Head, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", head.url)
    assert pipeline("status")[0] == 0
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert pipeline("status", "--address", head.url)[0] == 0, "what is written here counts"
    code, _, stderr = pipeline("status")
    assert code == 2
    assert "10.0.0.1:6379 is not the address of a job server" in stderr
    assert "--address http://10.0.0.1:8265" in stderr


def test_variable_that_should_go_along_must_be_set(head: Head, pipeline: Pipeline) -> None:
    arguments = ["lab.yaml", "tracking.uri=http://tracking:5000", "--env", "NOT_SET_ANYWHERE"]
    code, _, stderr = pipeline("submit", *arguments, "--address", head.url)
    assert code == 2
    assert "NOT_SET_ANYWHERE is not set here" in stderr


class Flaky:
    """Stands in for a cluster whose connections break in the middle of a job's output."""

    url = "http://there:8265"
    output = "one\ntwo\nthree\nfour\n"

    def __init__(self, *, is_gone: bool = False) -> None:
        self.client, self.tails, self.is_gone = self, 0, is_gone

    def job(self, identity: str) -> Job:
        if self.is_gone:
            raise ResourceError("no Ray cluster answers")
        return Job(id=identity, experiment="lab", status="SUCCEEDED" if self.tails > 3 else "RUNNING", exit_code=0)

    def logs(self, identity: str) -> str:
        return self.output

    async def tail_job_logs(self, identity: str) -> AsyncIterator[str]:
        self.tails += 1
        for line in self.output.splitlines(keepends=True)[: self.tails]:
            yield line
        raise aiohttp.ClientConnectionError


def test_output_is_shown_once_although_the_connection_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "_RETRY_S", 0.0)
    cluster, shown = Flaky(), list[str]()
    ended = following.follow(cast("Jobs", cluster), "lab-1", show=shown.append)
    assert ended.status == "SUCCEEDED"
    assert "".join(shown) == Flaky.output


def test_cluster_that_is_gone_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "_RETRY_S", 0.0)
    monkeypatch.setattr(following, "_PATIENCE_S", 0.0)
    cluster = Flaky(is_gone=True)
    with pytest.raises(
        ResourceError, match=r"lost the connection to http://there:8265\. lab-1 may still be running there"
    ):
        following.follow(cast("Jobs", cluster), "lab-1", show=lambda _: None)


def test_ctrl_c_ends_the_following_and_the_exit_code_is_that_of_the_run(
    head: Head,
    pipeline: Pipeline,
    start: Start,
    tmp_path: Path,
) -> None:
    address = ["--address", head.url]
    experiment = ["lab.yaml", "name=broken", f"tracking.uri=sqlite:///{tmp_path / 'mlflow.db'}", "--no-baseline"]
    experiment += ["parallel.workers=2", "parallel.strategy=ddp", "model={_target_: lab.Net, fault: raises, rank: 1}"]
    sender = start("submit", *experiment, *address, cwd=tmp_path / "project")
    assert sender.stdout is not None
    job = sender.stdout.readline().strip()
    sender.send_signal(signal.SIGINT)
    _, stderr = sender.communicate()
    assert sender.returncode == 130
    assert "stopped following; the job continues" in stderr
    assert f"pipeline logs {job} --follow --address {head.url}" in stderr
    code, logs, stderr = pipeline("logs", job, "--follow", *address)
    assert code == 1
    assert "rank 1" in logs
    assert f"{job}: FAILED with exit code 1" in stderr


@pytest.mark.parametrize("launcher", ["ray", "srun", "torchrun"])
def test_sbatch_script_trains_on_a_stand_in_for_slurm_is_requeued_and_resumed(
    launcher: str, repository: Path, tmp_path: Path
) -> None:
    """Its commands start everything on this machine; with Ray, two nodes with one address."""
    number = _free_ports(1)[0]
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

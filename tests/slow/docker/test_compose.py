"""The images are built, the compose cluster trains for real, and loses a worker and its head."""

import io
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests
from containers import CONTAINERS, PATIENCE_S, PROJECT, Cluster, docker, has_engine, inspected, user_ids
from waiting import eventually

from pipeline.record.journal import FILE_NAME

pytestmark = pytest.mark.timeout(2400)

IMAGES = ("pipeline-train:test", "pipeline-mlflow:test")
STEPS_PER_EPOCH = 12


class Ran(NamedTuple):
    """An experiment on the cluster."""

    output: str
    run: dict[str, Any]  # As MLflow has it

    @property
    def id(self) -> str:
        return str(self.run["info"]["run_id"])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if not has_engine():
        pytest.skip("no Docker engine answers here")
    with tempfile.TemporaryDirectory(prefix="compose") as folder:
        cluster = Cluster(Path(folder))
        try:
            cluster.compose("up", "--build", "--wait")
            yield cluster
        finally:
            sys.stdout.write(cluster.compose("logs", "--tail=30", check=False).stdout)  # shown if a test fails
            cluster.compose("down", "--volumes", "--timeout=10", check=False)


@pytest.fixture(scope="module")
def ran(cluster: Cluster) -> Ran:
    """The main experiment, shortened: a baseline, then two workers on two containers."""
    return finished(cluster, cluster.start_run("train.epochs=2", "train.log_every_steps=1"))


def finished(cluster: Cluster, process: subprocess.Popen[str], *, said: str = "") -> Ran:
    output = said + process.communicate(timeout=PATIENCE_S)[0]
    assert process.returncode == 0, output
    name = output.rpartition("Report   runs/")[2].partition("/")[0]
    runs = search(cluster, "tags.role = 'main'")
    (run,) = [run for run in runs if name in json.dumps(run["data"]["tags"])]
    return Ran(output, run)


def search(cluster: Cluster, condition: str) -> list[dict[str, Any]]:
    known = cluster.mlflow("experiments/search", max_results=100)["experiments"]
    ids = [experiment["experiment_id"] for experiment in known]
    return list(cluster.mlflow("runs/search", experiment_ids=ids, filter=condition).get("runs", []))


def steps(cluster: Cluster, run: str, metric: str) -> list[int]:
    """The steps of a metric's points, those that are there twice included."""
    points = cluster.mlflow(f"metrics/get-history?run_id={run}&metric_key={metric}")["metrics"]
    return sorted(int(point.get("step", 0)) for point in points)


def artifacts(cluster: Cluster, run: str) -> set[str]:
    return {str(file["path"]) for file in cluster.mlflow(f"artifacts/list?run_id={run}")["files"]}


def test_workers_are_on_two_containers(ran: Ran, cluster: Cluster) -> None:
    hosts = {inspected(name)["Config"]["Hostname"] for name in ("ray-worker-1", "ray-worker-2")}
    assert "\nddp, 2 workers: 701,178 parameters" in ran.output
    assert len(hosts) == 2
    events = cluster.execute("ray-head", "sh", "-c", f"cat runs/*/{FILE_NAME}")
    assert [host for host in hosts if f'"{host} cpu' not in events] == []


def test_every_point_is_in_the_database_once(ran: Ran, cluster: Cluster) -> None:
    assert ran.run["info"]["status"] == "FINISHED"
    assert steps(cluster, ran.id, "train/loss") == list(range(1, 2 * STEPS_PER_EPOCH + 1))
    assert steps(cluster, ran.id, "validation/accuracy") == [STEPS_PER_EPOCH, 2 * STEPS_PER_EPOCH]
    query = f"select count(*) from metrics where run_uuid = '{ran.id}' and key = 'train/loss'"
    counted = cluster.execute("postgres", "psql", "--username=mlflow", "--tuples-only", f"--command={query}")
    assert int(counted) == 2 * STEPS_PER_EPOCH


def test_the_baseline_is_a_child_run(ran: Ran, cluster: Cluster) -> None:
    (child,) = search(cluster, f"tags.mlflow.parentRunId = '{ran.id}'")
    assert child["info"]["status"] == "FINISHED"
    assert {"role": "baseline", "world_size": "1"}.items() <= {
        t["key"]: t["value"] for t in child["data"]["tags"]
    }.items()


def test_artifacts_come_through_the_server(ran: Ran, cluster: Cluster) -> None:
    assert {"experiment.yaml", "report.html", "result.json"} <= artifacts(cluster, ran.id)
    assert str(ran.run["info"]["artifact_uri"]).startswith("mlflow-artifacts:/")
    url = f"{cluster.address('mlflow')}/get-artifact?path=report.html&run_uuid={ran.id}"
    page = requests.get(url, auth=cluster.login, timeout=60)
    assert "2 workers (ddp)" in page.text
    assert requests.get(url, timeout=60).status_code == 401


def test_the_model_is_logged(ran: Ran, cluster: Cluster) -> None:
    (output,) = cluster.mlflow(f"runs/get?run_id={ran.id}")["run"]["outputs"]["model_outputs"]
    model = cluster.mlflow(f"logged-models/{output['model_id']}")["model"]
    assert model["info"]["status"] == "LOGGED_MODEL_READY"
    files = cluster.execute("mlflow", "find", "/mlflow/artifacts", "-path", f"*{output['model_id']}*", "-type", "f")
    assert "model.pt2" in files


def test_strangers_are_refused(cluster: Cluster) -> None:
    runs = f"{cluster.address('mlflow')}/api/2.0/mlflow/experiments/search?max_results=1"
    jobs = f"{cluster.address('ray-head')}/api/jobs/"
    answers: list[tuple[str, dict[str, Any], int]] = [
        (runs, {}, 401),
        (runs, {"auth": ("admin", "password1234")}, 401),
        (runs, {"auth": cluster.login}, 200),
        (runs, {"auth": cluster.login, "headers": {"Host": "elsewhere"}}, 403),
        (jobs, {}, 401),
        (jobs, {"headers": {"Authorization": "Bearer other"}}, 403),
        (jobs, {"headers": {"Authorization": f"Bearer {cluster.secrets['RAY_AUTH_TOKEN']}"}}, 200),
    ]
    for url, request, status in answers:
        assert requests.get(url, timeout=60, **request).status_code == status, (url, request)


def test_a_node_without_the_token_does_not_get_in(cluster: Cluster) -> None:
    line = ["sh", "-c", "RAY_AUTH_TOKEN=other timeout 60 ray status --address=$RAY_ADDRESS 2>&1; true"]
    assert "InvalidAuthToken" in cluster.execute("ray-worker", *line)


def test_no_process_is_root(cluster: Cluster) -> None:
    ids = {container: user_ids(container) for container in CONTAINERS}
    assert [container for container, found in ids.items() if not found or "0" in found] == []


def test_workers_have_no_way_out(cluster: Cluster) -> None:
    line = "import socket; print(socket.socket().connect_ex(('192.0.2.1', 80)))"  # an address for documentation
    assert cluster.execute("ray-worker", "python", "-c", line).strip() == "101"  # network is unreachable


def test_no_secret_is_written_down(ran: Ran, cluster: Cluster) -> None:
    texts = {f"history of {image}": docker("history", "--no-trunc", image) for image in IMAGES}
    texts |= {image: docker("image", "inspect", image) for image in IMAGES}
    texts |= {f"processes of {name}": docker("top", f"{PROJECT}-{name}", "-eo", "pid,args") for name in CONTAINERS}
    texts["containers' output"] = cluster.compose("logs").stdout
    texts["MLflow's runs"] = json.dumps(search(cluster, ""))
    texts["the run's output"] = ran.output
    texts |= dict(files_of("ray-head-1", "/workspace/runs"))
    texts |= dict(files_of("mlflow-1", "/mlflow/artifacts"))
    assert len(texts) > 30
    assert [(where, name) for where, text in texts.items() for name in found(text, cluster)] == []


def found(text: str, cluster: Cluster) -> Iterator[str]:
    return (name for name, value in cluster.secrets.items() if value in text)


def files_of(container: str, folder: str) -> Iterator[tuple[str, str]]:
    """The content of all files in a container's folder."""
    packed = subprocess.run(["docker", "cp", f"{PROJECT}-{container}:{folder}", "-"], capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        for member in archive:
            if member.isfile() and (file := archive.extractfile(member)):
                yield f"{container}:{member.name}", file.read().decode(errors="replace")


def test_a_killed_worker_is_replaced(cluster: Cluster) -> None:
    process = cluster.start_run("--no-baseline", "train.epochs=6", "train.log_every_steps=1", "parallel.max_failures=2")
    assert process.stdout is not None
    said = ""
    while "epoch 2/6" not in said:
        line = process.stdout.readline()
        assert line, said
        said += line
    docker("kill", f"{PROJECT}-ray-worker-2")
    cluster.compose("up", "--detach", "--no-build", "ray-worker")  # Docker takes a kill for the administrator's will
    ran = finished(cluster, process, said=said)
    assert "failure 1 of 2" in ran.output
    assert steps(cluster, ran.id, "train/loss") == list(range(1, 6 * STEPS_PER_EPOCH + 1))


def test_a_worker_that_dies_by_itself_is_started_again(cluster: Cluster) -> None:
    before = inspected("ray-worker-1")["RestartCount"]
    program = "import psutil; [each.kill() for each in psutil.process_iter() if each.name() == 'raylet']"
    cluster.execute("ray-worker", "python", "-c", program)
    eventually(lambda: inspected("ray-worker-1")["RestartCount"] > before, timeout_s=PATIENCE_S)
    eventually(lambda: cluster.health("ray-worker-1") == "healthy", timeout_s=PATIENCE_S)


def test_workers_without_a_head_are_unhealthy_and_come_back_with_it(cluster: Cluster) -> None:
    docker("kill", f"{PROJECT}-ray-head-1")
    names = ("ray-worker-1", "ray-worker-2")
    eventually(lambda: any(cluster.health(name) != "healthy" for name in names), timeout_s=PATIENCE_S)
    cluster.compose("up", "--detach", "--wait", "--no-build")
    eventually(lambda: nodes(cluster) == 3, timeout_s=PATIENCE_S)


def nodes(cluster: Cluster) -> int:
    """Nodes of the Ray cluster that live."""
    url = f"{cluster.address('ray-head')}/nodes?view=summary"
    token = {"Authorization": f"Bearer {cluster.secrets['RAY_AUTH_TOKEN']}"}
    answer = requests.get(url, headers=token, timeout=60).json()
    return sum(node["raylet"].get("state") == "ALIVE" for node in answer["data"]["summary"])

"""The compose cluster under another project name, with ports and secrets of its own, beside one that a user has."""

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import requests

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "docker"
FILE = FOLDER / "compose.yaml"
PROJECT = "pipeline-cluster-test"
CONTAINERS = ("postgres-1", "mlflow-1", "ray-head-1", "ray-worker-1", "ray-worker-2")
PATIENCE_S = 900.0  # on a machine that has other things to do

Published = Literal["mlflow", "ray-head"]


def has_compose() -> bool:
    """Whether there is the docker command with compose; an engine isn't asked for."""
    return bool(shutil.which("docker")) and _docker("compose", "version", check=False).returncode == 0


def has_engine() -> bool:
    return bool(shutil.which("docker")) and _docker("info", check=False).returncode == 0


def create_env(path: Path) -> dict[str, str]:
    """Create the file of secrets; returns them by name."""
    subprocess.run([FOLDER / "create-env.sh", path], check=True, capture_output=True)
    return dict(line.split("=", 1) for line in path.read_text().splitlines() if not line.startswith("#"))


def config(*files: str, env: Path) -> dict[str, Any]:
    """What compose understands, with all values put in."""
    done = _docker("compose", *_options(files, env=env), "config", "--format=json")
    return dict(json.loads(done.stdout))


def refusal(*, env: Path) -> str:
    """What compose says about files that it doesn't take; empty if it takes them."""
    done = _docker("compose", *_options(["compose.yaml"], env=env), "config", "--quiet", check=False)
    return done.stderr if done.returncode else ""


class Cluster:
    """All of docker/compose.yaml."""

    def __init__(self, folder: Path) -> None:
        self.env = folder / "secrets.env"
        self.secrets = create_env(self.env)
        with self.env.open("a") as file:  # MLflow answers to the port that it knows, so Docker can't pick one
            file.write("MLFLOW_PORT={}\nRAY_PORT={}\n".format(*_free_ports(2)))
            file.write("TRAIN_IMAGE=pipeline-train:test\nMLFLOW_IMAGE=pipeline-mlflow:test\n")

    def compose(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return _docker("compose", *self._options, *arguments, check=check)

    def start_run(self, *arguments: str) -> subprocess.Popen[str]:
        """What ``make cluster-run`` does."""
        overrides = ["parallel.launcher=ray", "parallel.placement=strict_spread", *arguments]
        line = ["docker", "compose", *self._options, "exec", "-T", "ray-head", "pipeline", "run"]
        return subprocess.Popen(
            [*line, "experiments/resnet.yaml", *overrides],
            text=True,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def execute(self, service: str, *line: str) -> str:
        return self.compose("exec", "-T", service, *line).stdout

    def address(self, service: Published) -> str:
        port = {"mlflow": "5000", "ray-head": "8265"}[service]
        return f"http://{self.compose('port', service, port).stdout.strip()}"

    def mlflow(self, path: str, **body: Any) -> dict[str, Any]:
        """What MLflow answers to its administrator: a question with a body is a POST."""
        url = f"{self.address('mlflow')}/api/2.0/mlflow/{path}"
        answer = requests.request("POST" if body else "GET", url, json=body or None, auth=self.login, timeout=60)
        answer.raise_for_status()
        return dict(answer.json())

    @property
    def login(self) -> tuple[str, str]:
        return "admin", self.secrets["MLFLOW_ADMIN_PASSWORD"]

    def health(self, container: str) -> str:
        return str(inspected(container)["State"]["Health"]["Status"])

    @property
    def _options(self) -> list[str]:
        return ["--project-name", PROJECT, *_options(["compose.yaml"], env=self.env)]


def docker(*arguments: str) -> str:
    """What ``docker ARGUMENTS`` prints, on both streams."""
    done = _docker(*arguments)
    return done.stdout + done.stderr


def inspected(container: str) -> dict[str, Any]:
    return dict(json.loads(docker("inspect", f"{PROJECT}-{container}"))[0])


def user_ids(container: str) -> set[str]:
    """Of all processes in a container."""
    return set(docker("top", f"{PROJECT}-{container}", "-eo", "uid,pid").split()[2::2])


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def _options(files: Sequence[str], *, env: Path) -> Iterator[str]:
    yield from (f"--file={FOLDER / name}" for name in files)
    yield f"--env-file={env}"


def _docker(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False, env=_environment())
    assert done.returncode == 0 or not check, (
        f"docker {' '.join(arguments)}\n{done.stdout[-5000:]}{done.stderr[-5000:]}"
    )
    return done


def _environment() -> Mapping[str, str]:
    """Of this process, without what would go before the file of secrets."""
    ours = ("MLFLOW_", "RAY_", "POSTGRES_", "TRAIN_IMAGE", "COMPOSE_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}

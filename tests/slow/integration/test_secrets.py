"""Planted secrets: a run uses them, and they are nowhere in what it shows, writes down, sends or starts.

Nor can anybody reach its processes from another machine.
"""

# promise: values of the environment are written nowhere

import hashlib
import os
import secrets
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from stores import Proxy, Server

from pipeline.errors import ExperimentError
from pipeline.experiment.load import config_hash, flatten, load, to_yaml

Start = Callable[..., "subprocess.Popen[str]"]
pytestmark = pytest.mark.timeout(600)

USED = "LAB_DB_PASS"  # Given to the model, which refuses any other. Its name does not say that it is a secret.
SECRET = "LAB_API_KEY"
KEYED = ["model._target_=lab.Keyed", f"model.key=${{oc.env:{USED}}}"]


@pytest.fixture
def planted() -> dict[str, str]:
    """Environment variables, each with a value of its own that stands nowhere else."""
    names = (USED, "MLFLOW_TRACKING_PASSWORD", "AWS_SECRET_ACCESS_KEY", "RAY_AUTH_TOKEN")
    return {name: f"planted-{secrets.token_hex(16)}" for name in names}


class Ran(NamedTuple):
    """What a run printed, and what could be seen of its processes meanwhile."""

    output: str
    lines: set[str]  # Command lines
    listening: set[str]  # Addresses on which others could reach them


def ran(*overrides: str, planted: Mapping[str, str], start: Start, project: Path, folder: Path, **more: str) -> Ran:
    digest = hashlib.sha256(planted[USED].encode()).hexdigest()
    whole = [*KEYED, f"model.digest={digest}", f"tracking.directory={folder}/runs", "train.epochs=1", *overrides]
    store = [f"tracking.uri=sqlite:///{folder}/mlflow.db"] if not any("tracking.uri" in o for o in overrides) else []
    environment = {**os.environ, **planted, **more}
    process = start("run", "lab.yaml", "--no-baseline", *whole, *store, cwd=project, env=environment)
    seen = Ran("", set(), set())
    over = threading.Event()
    watching = threading.Thread(target=watch, args=(process.pid, seen, over))
    watching.start()
    try:
        stdout, stderr = process.communicate(timeout=400)
    finally:
        over.set()
        watching.join()
    assert process.returncode == 0, stdout + stderr
    return seen._replace(output=stdout + stderr)


def watch(pid: int, seen: Ran, over: threading.Event) -> None:
    while not over.wait(0.2):
        with suppress(psutil.Error):
            for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
                seen.lines.add(" ".join(process.cmdline()))
                ends = [each.laddr for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN]
                seen.listening.update(end.ip.removeprefix("::ffff:") for end in ends)


def assert_nowhere(values: Mapping[str, str], folder: Path, run: Ran) -> None:
    """Neither in what was seen nor in a file."""
    texts = (run.output, *run.lines)
    assert list(folder.rglob("events.jsonl"))
    files = [path for path in folder.rglob("*") if path.is_file()]
    for name, value in values.items():
        assert not [text for text in texts if value in text], name
        assert not [path for path in files if value.encode() in path.read_bytes()], name


def test_a_run_uses_secrets_and_leaves_them_nowhere(
    planted: dict[str, str], start: Start, project: Path, tmp_path: Path
) -> None:
    overrides = ["parallel.strategy=ddp", "parallel.launcher=torchrun", "parallel.workers=2", "tracking.log_model=true"]
    run = ran(*overrides, planted=planted, start=start, project=project, folder=tmp_path)

    assert any("pipeline.worker import work" in line for line in run.lines)  # they were seen while they ran
    assert run.listening == {"127.0.0.1"}
    assert_nowhere(planted, tmp_path, run)
    (written,) = tmp_path.glob("runs/*/experiment.yaml")
    assert f"${{oc.env:{USED}}}" in written.read_text()


def test_neither_do_ray_s_workers(planted: dict[str, str], start: Start, project: Path, tmp_path: Path) -> None:
    overrides = ["parallel.strategy=ddp", "parallel.launcher=ray", "parallel.workers=2"]
    run = ran(*overrides, planted=planted, start=start, project=project, folder=tmp_path)

    assert any("raylet" in line for line in run.lines)  # which listens on all interfaces, and asks for its token
    assert_nowhere(planted, tmp_path, run)


def test_credentials_reach_the_server_and_nothing_else(
    planted: dict[str, str], start: Start, project: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "server"
    folder.mkdir()
    server = Server(folder)
    server.start()
    try:
        with Proxy(server) as proxy:
            proxy.password = planted["MLFLOW_TRACKING_PASSWORD"]
            in_the_address = proxy.uri.replace("://", "://me:${oc.env:MLFLOW_TRACKING_PASSWORD}@")
            for uri, more in ((in_the_address, {}), (proxy.uri, {"MLFLOW_TRACKING_USERNAME": "me"})):
                run = ran(f"tracking.uri={uri}", planted=planted, start=start, project=project, folder=tmp_path, **more)
                assert "takes no" not in run.output  # MLflow has taken all results
                assert_nowhere(planted, tmp_path, run)
    finally:
        server.kill()


def test_in_the_experiment_stands_the_reference(project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def read(*overrides: str, path: Path = project / "lab.yaml") -> Any:
        return load(path, [*KEYED, "model.digest=Bearer ${oc.env:HF_TOKEN,none}", *overrides]).experiment

    monkeypatch.setenv(USED, "first-value")
    first = read("data.samples=${model.key}")
    monkeypatch.setenv(USED, "second-value")
    second = read("data.samples=${model.key}")
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(first))

    assert flatten(first)["model.key"] == flatten(first)["data.samples"] == f"${{oc.env:{USED}}}"
    assert flatten(first)["model.digest"] == "Bearer ${oc.env:HF_TOKEN,none}"
    assert config_hash(first) == config_hash(second)
    assert load(again).experiment == first


def test_where_a_secret_would_be_written_down_it_is_refused(project: Path) -> None:
    with pytest.raises(ExperimentError, match=rf"tracking.experiment: {SECRET} is a secret by its name"):
        load(project / "lab.yaml", [f"tracking.experiment=${{oc.env:{SECRET}}}"])
    with pytest.raises(ExperimentError, match=rf"seed: {SECRET} is a secret by its name"):
        load(project / "lab.yaml", [f"seed=${{oc.decode:${{oc.env:{SECRET}}}}}"])


def test_a_secret_that_is_not_set_is_named_before_the_run(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SECRET, raising=False)

    ended = command("run", "lab.yaml", *KEYED, f"model.key=${{oc.env:{SECRET}}}", "model.digest=0", "--no-baseline")

    assert ended.code == 2
    assert f"the environment variable {SECRET} is not set. Set it" in ended.stderr
    assert "lab.yaml" in ended.stderr or "command line" in ended.stderr

"""The doctor on this machine, on a real Ray, and at stores that are not what they should be."""

# promise: `doctor`

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.commands.doctor import CheckResult, Examination, check_tracking

MLFLOW = metadata.version("mlflow")
Command = Callable[..., Any]
REFUSED = "Invalid Host header - possible DNS rebinding attack detected"


@contextmanager
def server(*, status: int = 200, text: str = "", version: str = "") -> Iterator[str]:
    """Someone else's server at this address: healthy, and with one answer to all else but its version."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            here = {"/health": (200, "OK"), "/version": (200, version) if version else (404, "")}
            code, body = here.get(self.path, (status, text))
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *args: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}"
        finally:
            listening.shutdown()


def looked_at(uri: str) -> CheckResult:
    return check_tracking(uri, client=MLFLOW)


def test_this_machine(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    before = set(Path().iterdir())  # other tests have left a store here, or not

    ended = command("doctor", "lab.yaml", "--json")

    assert ended.code == 0, ended.output
    examination = Examination.model_validate_json(ended.stdout)
    (node,) = examination.nodes
    assert node.torch is not None
    assert node.torch.version == torch.__version__
    assert {finding.status for finding in examination.findings} <= {"ok", "warning"}
    assert {"versions", "GPUs", "MLflow"} <= {finding.subject for finding in examination.findings}
    assert "mlflow.db can be written" in ended.stdout
    assert set(Path().iterdir()) - before <= {Path("__pycache__")}


def test_a_store_that_cannot_be_written_ends_in_3(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////nowhere/mlflow.db")

    ended = command("doctor")

    assert ended.code == 3
    assert re.search(
        r"problem MLflow: tracking.uri: the folder /nowhere .* doesn't exist", " ".join(ended.stdout.split())
    )
    assert "fix: Create it: mkdir -p /nowhere" in ended.stdout
    assert "1 problem" in ended.stdout


def test_no_cluster_at_the_address_ends_in_3(command: Command) -> None:
    ended = command("doctor", "--address", "127.0.0.1:1")

    assert ended.code == 3
    assert "no Ray cluster answers at 127.0.0.1:1" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("status", "text", "said", "fix"),
    [
        (401, "You are not authenticated", "requires a valid login (401: You are not", "MLFLOW_TRACKING_PASSWORD"),
        (403, "Permission denied", "denies access to experiments (403", "MLFLOW_TRACKING_PASSWORD"),
        (403, REFUSED, "rejects the host name 127.0.0.1:", "--allowed-hosts 127.0.0.1:"),
        (404, "<h1>a web page</h1>", "is not an MLflow server", "tracking.uri"),
    ],
)
def test_a_server_that_would_never_take_results_is_a_problem(status: int, text: str, said: str, fix: str) -> None:
    with server(status=status, text=text) as uri:
        finding = looked_at(uri)

    assert finding.status == "problem"
    assert said in finding.what
    assert fix in finding.fix


def test_a_server_that_is_down_or_fails_is_a_warning_without_its_password() -> None:
    down = looked_at("http://me:planted@127.0.0.1:1")
    with server(status=500, text="out of order") as uri:
        failing = looked_at(uri.replace("://", "://me:planted@"))

    assert (down.status, failing.status) == ("warning", "warning")
    assert "http://127.0.0.1:1 doesn't answer" in down.what
    assert "answers with status 500" in failing.what
    assert "planted" not in f"{down} {failing}"


def test_an_older_server_is_a_warning_and_one_as_new_is_not() -> None:
    with server(version="2.22.1") as uri:
        older = looked_at(uri)
    with server(version=MLFLOW) as uri:
        equal = looked_at(uri)

    assert older.status == "warning"
    assert f"The server is MLflow 2.22.1, the client here {MLFLOW}" in older.what
    assert f"pip install mlflow=={MLFLOW}" in older.fix
    assert equal.status == "ok"

"""What can't be submitted is told before anything is sent; scripts are printed."""

# promise: `submit`, the script for Slurm

import http.server
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from stores import free_port

pytestmark = pytest.mark.timeout(900)
Pipeline = Callable[..., tuple[int, str, str]]


@pytest.fixture
def pipeline(command: Pipeline, repository: Path, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    """``pipeline ARGUMENTS`` in the repository."""
    monkeypatch.chdir(repository)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return command


ACCEPTED = ("submit", "lab.yaml", "tracking.uri=http://tracking:5000")


def test_nobody_there_is_an_error(pipeline: Pipeline) -> None:
    port = free_port()
    code, _, stderr = pipeline(*ACCEPTED, "--address", f"http://127.0.0.1:{port}")
    assert code == 3
    assert f"no Ray cluster answers at http://127.0.0.1:{port}: Connection refused" in stderr


def test_an_address_of_a_job_server_is_needed(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, stderr = pipeline(*ACCEPTED)
    assert code == 2
    assert "Use --address http://HOST:8265, or set RAY_ADDRESS" in stderr
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    code, _, stderr = pipeline(*ACCEPTED)
    assert code == 2
    assert "10.0.0.1:6379 is not the address of a job server" in stderr
    assert "--address http://10.0.0.1:8265" in stderr


@contextmanager
def _server(answer: bytes) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("answer", [b'{"ray_version": "1.13.0"}', b"<html>another server</html>"])
def test_server_that_is_none_of_ray_or_too_old_is_an_error(answer: bytes, pipeline: Pipeline) -> None:
    with _server(answer) as url:
        code, _, stderr = pipeline(*ACCEPTED, "--address", url)
    assert code == 3
    assert url in stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lab.yaml"], "lab.yaml:8: tracking.uri: is sqlite:///mlflow.db, a file in the job's working directory"),
        (["lab.yaml", "train.epoch=3"], "command line: train.epoch=3: train.epoch: unknown key"),
        (["lab.yaml", "tracking.uri=http://me:secret-word@host:5000"], "tracking.uri: contains a password"),
        (
            ["lab.yaml", "tracking.uri=http://t:5000", "checkpoint.directory=ckpt"],
            "checkpoint.directory: is ckpt, a folder",
        ),
        (["new.yaml", "tracking.uri=http://t:5000"], "new.yaml: git doesn't track this file"),
        (["lab.yaml", "tracking.uri=http://t:5000", "--env", "A=secret-word"], "--env takes the name of a variable"),
        (["lab.yaml", "--nodes", "2"], "--nodes needs --slurm"),
        (["lab.yaml", "--launcher", "srun"], "--launcher needs --slurm"),
    ],
)
def test_mistakes_are_told_before_anything_is_sent(arguments: list[str], said: str, pipeline: Pipeline) -> None:
    shutil.copy("lab.yaml", "new.yaml")
    code, stdout, stderr = pipeline("submit", *arguments, "--address", "http://127.0.0.1:1")
    assert code == 2
    assert said in stderr
    assert not stdout
    assert "secret-word" not in stderr


def test_the_script_for_slurm_is_printed(pipeline: Pipeline) -> None:
    code, stdout, _ = pipeline("submit", "lab.yaml", "parallel.cpus_per_worker=1", "--slurm")
    assert (code, stdout.splitlines()[0]) == (0, "#!/bin/bash")

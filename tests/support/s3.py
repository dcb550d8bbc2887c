"""A server with S3's interface, spoken to over HTTP, which can be killed."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import fsspec
import pytest
from stores import free_port
from waiting import eventually

BUCKET = "bucket"
SECRET = "sesame-of-the-bucket"


class S3:
    """Its content is in its memory, and ends with it; there is always an empty bucket when it starts."""

    def __init__(self) -> None:
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        line = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self.process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        eventually(self.answers, what=f"moto's server at {self.uri}")
        fsspec.filesystem("s3").mkdir(BUCKET)

    def answers(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
            return True
        return False

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    server = S3()
    variables = {
        "AWS_ENDPOINT_URL": server.uri, "AWS_ACCESS_KEY_ID": "AKIATESTS", "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_MAX_ATTEMPTS": "1",
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    fsspec.filesystem("s3").clear_instance_cache()  # of another test's server
    server.start()
    yield server
    server.kill()

"""Tracking stores that go wrong: an MLflow server that can be killed, and a proxy before it that can fail."""

import http.client
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from base64 import b64encode
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from waiting import eventually

Fault = Literal["", "fails", "hangs", "slow", "loses answers"]


def free_port() -> int:
    """A port that stays free for some time: not one of those that the system hands out."""
    while True:
        port = random.randrange(20_000, 32_000)
        with closing(socket.socket()) as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Server:
    """An MLflow server that can be killed and started again on the same port and files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--port", str(self.port), "--workers", "1"]
        command += ["--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db"]
        command += ["--artifacts-destination", (self.folder / "mlartifacts").as_uri()]
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, env=environment, cwd=self.folder, stdout=log, stderr=log, start_new_session=True
            )
        eventually(self.answers, what=f"an MLflow server at {self.uri}")

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=2):
                return True
        except (OSError, http.client.HTTPException):
            return False

    def kill(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


class Proxy:
    """Stands before a server, and does to the requests of some paths what a bad day does."""

    def __init__(self, server: Server) -> None:
        self.target = urlsplit(server.uri)
        self.fault: Fault = ""
        self.where = ""  # Only paths that contain this are struck
        self.delay_s = 1.0  # Of each answer, if it is slow
        self.password = ""  # Asked for, if there is one; the user is called "me"
        self.struck = 0  # Requests that the fault has met
        self._server = _Quiet(("127.0.0.1", 0), self._handler())
        self.port = self._server.server_port
        self.uri = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.fault = ""  # lets those go who hang
        self._server.shutdown()
        self._server.server_close()

    def admits(self, authorization: str | None) -> bool:
        return not self.password or authorization == f"Basic {b64encode(f'me:{self.password}'.encode()).decode()}"

    def _handler(proxy) -> type[BaseHTTPRequestHandler]:  # noqa: N805 - self is the handler, below
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def relay(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                fault = proxy.fault if proxy.where in self.path else ""
                proxy.struck += bool(fault)
                if fault == "hangs":
                    eventually(lambda: proxy.fault != "hangs")
                    self.close_connection = True
                    return
                if not proxy.admits(self.headers.get("Authorization")):
                    self.answer(401, b"who are you?")
                    return
                if fault == "fails":
                    self.answer(500, b"out of order")
                    return
                if fault == "slow":
                    time.sleep(proxy.delay_s)
                status, answer = self.forwarded(body)
                if fault == "loses answers":
                    self.close_connection = True
                else:
                    self.answer(status, answer)

            def forwarded(self, body: bytes) -> tuple[int, bytes]:
                with closing(http.client.HTTPConnection(str(proxy.target.netloc), timeout=60)) as connection:
                    try:
                        connection.request(self.command, self.path, body, dict(self.headers))
                        response = connection.getresponse()
                        return response.status, response.read()
                    except OSError:
                        return 502, b"nobody there"

            def answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = relay  # noqa: N815 - the names that http.server calls

            def log_message(self, *args: Any) -> None: ...

        return Handler


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has given up."""

"""``pipeline ui``: MLflow's own UI on a tracking store, with the links to its pages of runs."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import IO, Annotated

import typer

from pipeline.commands.options import say
from pipeline.errors import ResourceError, UsageError
from pipeline.experiment.uris import without_credentials
from pipeline.tracking.store import artifact_root, check_store, is_server, resolve_uri, runs_link, sqlite_path

_START_TIMEOUT_S, _STOP_TIMEOUT_S, _TIMEOUT_S = 60.0, 2.0, 5.0
_MOST = 10
_HOST = "127.0.0.1"


def ui(
    store: Annotated[
        str, typer.Option(envvar="MLFLOW_TRACKING_URI", metavar="URI", help="Tracking server or database to show.")
    ] = "sqlite:///mlflow.db",
    port: Annotated[int, typer.Option(min=1, max=65535, metavar="PORT", help="Port on localhost.")] = 5000,
) -> None:
    """Serve the MLflow UI with the results on localhost."""
    serve(resolve_uri(store, base=Path.cwd()), port=port, ready=_print_links)


def _print_links(address: str) -> None:
    """Print a link to the runs of each experiment, since MLflow opens with its pages for GenAI."""
    try:
        links = [f"{experiment}: {link}" for experiment, link in pages(address)]
    except (OSError, ValueError) as error:  # a server that asks for a password, or one that isn't MLflow
        links = [f"The experiments cannot be listed: {error}"]
    say("\n".join([f"MLflow UI: {address}", *links]))


def serve(uri: str, *, port: int, ready: Callable[[str], None] | None = None) -> str:
    """Serve the UI, whose address ``ready`` gets, until interrupted; return at once if the store is a server."""
    if is_server(uri):
        if ready:
            ready(without_credentials(uri))
        return without_credentials(uri)
    if (path := sqlite_path(uri)) and not path.exists():
        raise UsageError(f"{path}: no runs yet. Start one with pipeline run EXPERIMENT.")
    check_store(uri)
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError as error:
            raise UsageError(f"port {port} on {_HOST}: {error.strerror}. Choose another port with --port.") from None
    address = f"http://{_HOST}:{port}"
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri]
    command += ["--host", _HOST, "--port", str(port), "--workers", "1"]
    if root := artifact_root(uri):
        command += ["--artifacts-destination", root]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with tempfile.TemporaryFile("w+") as log:
        # In a process group of its own: Ctrl-C reaches only this process, which then ends the group.
        server = subprocess.Popen(  # noqa: S603 - our own arguments
            command, env=environment, cwd=path.parent if path else None, stdout=log, stderr=log, start_new_session=True
        )
        try:
            _wait_until_healthy(server, address=address, log=log)
            if ready:
                ready(address)
            server.wait()
        except KeyboardInterrupt:
            pass
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(server.pid, number)
                    server.wait(_STOP_TIMEOUT_S)
    return address


def _wait_until_healthy(server: subprocess.Popen[bytes], *, address: str, log: IO[str]) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            log.seek(0)
            last = "\n".join(log.read().splitlines()[-5:])
            raise ResourceError(f"the MLflow server ended with exit code {server.returncode}:\n{last}")
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=_TIMEOUT_S):  # noqa: S310 - http
                return
        except OSError:
            time.sleep(0.2)
    raise ResourceError(f"the MLflow server doesn't answer on {address} after {_START_TIMEOUT_S:.0f} seconds")


def pages(address: str) -> Iterator[tuple[str, str]]:
    """Yield the experiments that were updated last, the latest first: name, link to the runs."""
    query = urllib.parse.urlencode({"max_results": _MOST, "order_by": "last_update_time DESC"})
    url = f"{address}/api/2.0/mlflow/experiments/search?{query}"
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:  # noqa: S310 - http(s), see is_server
        found = json.load(answer).get("experiments", [])
    for experiment in found:
        yield experiment["name"], runs_link(address, experiment["experiment_id"])

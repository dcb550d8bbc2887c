"""Where MLflow keeps its runs: a SQLite file, a server, or another database that MLflow knows."""

import os
import re
import urllib.error
import urllib.request
from pathlib import Path

from pipeline.config.uris import SQLITE, problem_of, without_credentials
from pipeline.errors import ResourceError
from pipeline.recording import sqlite_store

_SCHEMES = ("sqlite", "http", "https", "postgresql", "mysql", "mssql", "databricks")
_HEALTH_TIMEOUT_S = 3
_CREDENTIALS = re.compile(r"(?<=://)[^/\s]*@")
_TRAINING_VIEW = "workflowType=machine_learning"  # without it, MLflow's menu is that for GenAI
VIEW = "speedups"
"""What links to the table of runs call the view that `pipeline.recording.mlflow_view` saves."""
UI_ADDRESS = "http://127.0.0.1:5000"
"""Where ``pipeline ui`` serves unless told otherwise."""


def resolve_uri(uri: str, *, base: Path) -> str:
    """The same store for every working directory: the relative path of a SQLite file becomes absolute."""
    path, mark, query = uri.removeprefix(SQLITE).partition("?")
    if not uri.startswith(SQLITE):
        return uri
    return f"{SQLITE}{(base.absolute() / path)}{mark}{query}"


def sqlite_path(uri: str) -> Path | None:
    """The file of a SQLite store; None for every other store."""
    if not uri.startswith(SQLITE):
        return None
    return Path(uri.removeprefix(SQLITE).partition("?")[0])


def artifact_root(uri: str) -> str | None:
    """Where new experiments keep their artifacts: beside a SQLite file; None where the server decides."""
    path = sqlite_path(uri)
    return (path.parent / "mlartifacts").absolute().as_uri() if path else None


def create_store(uri: str) -> None:
    """Create a SQLite store unless it is there; other stores are created by whoever serves them.

    Raises:
        Exception: see `pipeline.recording.sqlite_store.create`.
    """
    path, artifacts = sqlite_path(uri), artifact_root(uri)
    if path is not None and artifacts is not None:
        sqlite_store.create(path, artifacts=artifacts)


def is_server(uri: str) -> bool:
    """Whether the store is reached over HTTP."""
    return uri.startswith(("http://", "https://"))


def with_credentials(uri: str) -> str:
    """A store's URI as the environment has it: with what `without_credentials` has removed.

    MLFLOW_TRACKING_URI is taken if it names the same store. MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD
    need nothing done: MLflow adds them itself.
    """
    current = os.environ.get("MLFLOW_TRACKING_URI", "")
    return current if without_credentials(current) == uri else uri


def redacted(text: str) -> str:
    """A text without the credentials of any address in it."""
    return _CREDENTIALS.sub("", text)


def check_store(uri: str) -> str | None:
    """Find out before training whether results can be kept. Creates nothing.

    Args:
        uri: tracking URI, as `resolve_uri` returns it.

    Returns:
        A warning if a server doesn't answer now: training goes on, and the journal waits for it. Else None.

    Raises:
        ResourceError: no results can ever be written there.
    """
    if problem := problem_of(uri):
        raise ResourceError(f"tracking.uri: is {without_credentials(uri)}; {problem}")
    scheme = uri.partition("://")[0].partition("+")[0]
    if scheme not in _SCHEMES:
        raise ResourceError(
            f"tracking.uri: MLflow has no store for {without_credentials(uri)}; write sqlite:///mlflow.db or http://HOST:PORT"
        )
    if path := sqlite_path(uri):
        try:
            sqlite_store.check(path)
        except OSError as error:
            raise ResourceError(f"tracking.uri: {path} can't be used ({error.strerror}); name another file") from error
    return _check_server(uri) if is_server(uri) else None


def run_link(uri: str, experiment_id: str, run_id: str) -> str:
    """Where people look at a run: an address, preceded by the command that serves it if no server does yet."""
    page = f"{ui_address(uri)}/#/experiments/{experiment_id}/runs/{run_id}?{_TRAINING_VIEW}"
    return page if is_server(uri) else f"pipeline ui, then {page}"


def runs_link(address: str, experiment_id: str) -> str:
    """Where people compare the runs of an experiment; without ``/runs`` MLflow opens its page for GenAI."""
    return f"{address}/#/experiments/{experiment_id}/runs?viewStateShareKey={VIEW}&{_TRAINING_VIEW}"


def ui_address(uri: str) -> str:
    """Where the UI on a store is, or will be once ``pipeline ui`` serves it."""
    return without_credentials(uri).rstrip("/") if is_server(uri) else UI_ADDRESS


def _check_server(uri: str) -> str | None:
    try:
        with urllib.request.urlopen(f"{without_credentials(uri).rstrip('/')}/health", timeout=_HEALTH_TIMEOUT_S):  # noqa: S310 - the scheme is http(s)
            return None
    except urllib.error.HTTPError:
        return None  # it answers; a proxy in front of it may ask for credentials that only MLflow sends
    except OSError as error:
        reason = getattr(error, "reason", error)
        return (
            f"{without_credentials(uri)} doesn't answer ({reason}); "
            "training goes on, results wait in the journal until it does"
        )

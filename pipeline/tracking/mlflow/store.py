"""MLflow's tracking store by its URI: a SQLite file, a server, or another database; checks and links."""

import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeline.errors import ResourceError
from pipeline.experiment.uris import SQLITE, expand_home, problem_of, without_credentials
from pipeline.tracking.mlflow import sqlite_store

_SCHEMES = ("sqlite", "http", "https", "postgresql", "mysql", "mssql", "databricks")
_HEALTH_TIMEOUT_S = 3
_TRAINING_VIEW = "workflowType=machine_learning"  # without it, MLflow's UI shows the menu for GenAI
_UI_ADDRESS = "http://127.0.0.1:5000"  # of `pipeline ui` by default
_UI_TIMEOUT_S = 1.0


def resolve_uri(uri: str, *, base: Path) -> str:
    """Make the path of a SQLite file absolute, which may start with ``~``; return other URIs unchanged."""
    path, mark, query = expand_home(uri).removeprefix(SQLITE).partition("?")
    if not uri.startswith(SQLITE):
        return uri
    return f"{SQLITE}{(base.absolute() / path)}{mark}{query}"


def sqlite_path(uri: str) -> Path | None:
    """Return the file of a SQLite store; None for other stores."""
    if not uri.startswith(SQLITE):
        return None
    return Path(uri.removeprefix(SQLITE).partition("?")[0])


def artifact_root(uri: str) -> str | None:
    """Return the artifact location of new experiments: beside a SQLite file; None if the server decides."""
    path = sqlite_path(uri)
    return (path.parent / "mlartifacts").absolute().as_uri() if path else None


def create_store(uri: str) -> None:
    """Create a SQLite store unless it exists; other stores are created by their servers.

    Raises:
        Exception: see `pipeline.tracking.mlflow.sqlite_store.create`.
    """
    path, artifacts = sqlite_path(uri), artifact_root(uri)
    if path is not None and artifacts is not None:
        sqlite_store.create(path, artifacts=artifacts)


def is_server(uri: str) -> bool:
    """Return True if the store is a server, reached over HTTP."""
    return uri.startswith(("http://", "https://"))


def with_credentials(uri: str) -> str:
    """Return a store's URI with the credentials of MLFLOW_TRACKING_URI, if that names the same store.

    MLflow itself reads MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD.
    """
    current = os.environ.get("MLFLOW_TRACKING_URI", "")
    return current if without_credentials(current) == uri else uri


def check_store(uri: str) -> str | None:
    """Check before training that the store can keep results. Creates nothing.

    Args:
        uri: tracking URI, as `resolve_uri` returns it.

    Returns:
        A warning if a server doesn't answer now, else None. Training continues; results wait in the journal.

    Raises:
        ResourceError: the store can never keep results.
    """
    if problem := problem_of(uri):
        raise ResourceError(f"tracking.uri: is {without_credentials(uri)}; {problem}")
    scheme = uri.partition("://")[0].partition("+")[0]
    if scheme not in _SCHEMES:
        raise ResourceError(
            f"tracking.uri: MLflow has no store for {without_credentials(uri)}. Use sqlite:///mlflow.db or http://HOST:PORT."
        )
    if path := sqlite_path(uri):
        try:
            sqlite_store.check(path)
        except OSError as error:
            raise ResourceError(f"tracking.uri: {path} can't be used ({error.strerror}). Name another file.") from error
    return _check_server(uri) if is_server(uri) else None


def run_link(uri: str, experiment_id: str, run_id: str) -> str:
    """Return the link to a run in MLflow's UI, after the command that serves the UI if none is running."""
    page = run_page(ui_address(uri), experiment_id, run_id)
    return page if is_server(uri) or _running_ui(uri) else f"pipeline ui, then {page}"


def run_page(address: str, experiment_id: str, run_id: str) -> str:
    """Return the address of a run's page; of an empty ``address`` it is relative to any page of MLflow's UI."""
    return f"{address}{'/' if address else ''}#/experiments/{experiment_id}/runs/{run_id}?{_TRAINING_VIEW}"


def runs_link(address: str, experiment_id: str) -> str:
    """Return the link to the table of runs; without ``/runs`` MLflow opens its page for GenAI."""
    return f"{address}/#/experiments/{experiment_id}/runs?{_TRAINING_VIEW}"


def ui_address(uri: str) -> str:
    """Return the address of the UI: the server's, of the running ``pipeline ui``, or its default."""
    return without_credentials(uri).rstrip("/") if is_server(uri) else _running_ui(uri) or _UI_ADDRESS


@contextmanager
def ui_recorded(uri: str, address: str) -> Iterator[None]:
    """Keep the address of ``pipeline ui`` next to a SQLite store while the UI runs, for the links to its pages."""
    path = sqlite_path(uri)
    if path is None:
        yield
        return
    file = _ui_file(path)
    with suppress(OSError):  # a folder that can't be written: links have the default address
        file.write_text(address, encoding="utf-8")
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink()


def _ui_file(path: Path) -> Path:
    return path.with_name(f"{path.name}-ui")


def _running_ui(uri: str) -> str:
    """Return the address of the ``pipeline ui`` that serves a SQLite store now; empty if none does."""
    if (path := sqlite_path(uri)) is None:
        return ""
    try:
        address = _ui_file(path).read_text(encoding="utf-8")
        with urllib.request.urlopen(f"{address}/health", timeout=_UI_TIMEOUT_S):  # noqa: S310 - written by ui_recorded
            return address
    except (OSError, ValueError):  # none was started, or it was killed
        return ""


def _check_server(uri: str) -> str | None:
    try:
        with urllib.request.urlopen(f"{without_credentials(uri).rstrip('/')}/health", timeout=_HEALTH_TIMEOUT_S):  # noqa: S310 - the scheme is http(s)
            return None
    except urllib.error.HTTPError:
        return None  # it answers; a proxy may ask for credentials that only MLflow sends
    except OSError as error:
        reason = getattr(error, "reason", error)
        return (
            f"{without_credentials(uri)} doesn't answer ({reason}). "
            "Training continues, and results wait in the run's folder until it does"
        )

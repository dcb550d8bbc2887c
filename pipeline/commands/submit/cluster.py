"""The way to a cluster's job server: its address, our token, and its errors in words."""

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

from pipeline.errors import ResourceError, UsageError
from pipeline.system.process import environment

for _chatty in (
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
    "ray._private.runtime_env.packaging",
):
    logging.getLogger(_chatty).setLevel(logging.WARNING)  # they set themselves to INFO when they are imported

_REACH_S = 10.0
_AGENT_S = 60.0
_NO_AGENT = "Request failed with status code 500: No available agent"
"""How the error begins that Ray's client makes of it: one type for all answers, and no status but in the text."""
_PORT = 8265


def connect(address: str | None) -> JobSubmissionClient:
    """A client of the job server at ``address``, by default at RAY_ADDRESS.

    Raises:
        UsageError: there is no such address, or it isn't that of a job server.
        ResourceError: nobody answers there, or the token is wrong.
    """
    url = _url(address or os.environ.get("RAY_ADDRESS") or "")
    _check_reachable(url)
    # Ray's client would prefer these to what it is told.
    with explained(url), _without("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        return JobSubmissionClient(url, headers=_authorization())


@contextmanager
def explained(url: str) -> Iterator[None]:
    """Errors of the job server in words.

    Raises:
        ResourceError: it doesn't answer, refuses our token, or fails.
    """
    try:
        yield
    except AuthenticationError as error:
        said = "refuses the token" if _authorization() else "wants a token"
        raise ResourceError(
            f"the Ray cluster at {url} {said}; set RAY_AUTH_TOKEN to the cluster's (there: ray get-auth-token), "
            "or RAY_AUTH_TOKEN_PATH to a file with it"
        ) from error
    except (requests.RequestException, ConnectionError) as error:
        raise ResourceError(f"no Ray cluster answers at {url}: {_reason(error)}") from error
    except RuntimeError as error:
        raise ResourceError(f"the Ray cluster at {url} answered: {_first_line(error)}") from error


def once_ready(call: Callable[..., object], **arguments: object) -> None:
    """Call something that needs the agent of a node: a head that has just been started answers before it has one.

    Raises:
        RuntimeError: what the call raises, or there is no agent after a minute.
    """
    deadline = time.monotonic() + _AGENT_S
    while True:
        try:
            call(**arguments)
            return
        except RuntimeError as error:
            if not str(error).startswith(_NO_AGENT) or time.monotonic() >= deadline:
                raise
        time.sleep(1)


def _url(address: str) -> str:
    parts = urlsplit(address)
    if parts.scheme in ("http", "https") and parts.hostname:
        return address.rstrip("/")
    if not address:
        raise UsageError(f"where is the cluster? Add --address http://HOST:{_PORT}, or set RAY_ADDRESS to that")
    host = (parts.hostname if "://" in address else address.partition(":")[0]) or "HOST"
    raise UsageError(
        f"{address} is not the address of a job server; write that of the cluster's dashboard, "
        f"e.g. --address http://{host}:{_PORT}"
    )


def _check_reachable(url: str) -> None:
    """Try the address ourselves: the client would wait for minutes.

    Raises:
        ResourceError: nobody listens there.
    """
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=_REACH_S).close()
    except OSError as error:
        raise ResourceError(
            f"no Ray cluster answers at {url}: {error.strerror or error}; "
            "it needs a head with a dashboard (ray[default], ray start --head --include-dashboard=true)"
        ) from error


def _authorization() -> dict[str, str]:
    """Ours, where one was given: Ray itself would send none unless RAY_AUTH_MODE is set, too."""
    token = os.environ.get("RAY_AUTH_TOKEN")
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    if not token and not path and os.environ.get("RAY_AUTH_MODE") == "token":
        path = str(Path.home() / ".ray" / "auth_token")
    if not token and path:
        try:
            token = Path(path).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise UsageError(f"RAY_AUTH_TOKEN_PATH: {path} can't be read: {error.strerror}") from None
    return {"Authorization": f"Bearer {token}"} if token else {}


@contextmanager
def _without(*names: str) -> Iterator[None]:
    with environment(**dict.fromkeys(names)):
        for name in names:
            os.environ.pop(name, None)
        yield


def _reason(error: Exception) -> str:
    return _first_line(error).rpartition(": ")[2] if isinstance(error, requests.RequestException) else str(error)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

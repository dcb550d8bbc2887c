"""Client of a Ray cluster's job server: address, authentication, and errors as messages for the user."""

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
from pipeline.wording import first_line

for _chatty in (
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
    "ray._private.runtime_env.packaging",
):
    logging.getLogger(_chatty).setLevel(logging.WARNING)  # they set their own level to INFO on import

_REACH_S = 10.0
_AGENT_S = 60.0
_NO_AGENT = "Request failed with status code 500: No available agent"
"""Start of the message while a head has no agent; Ray's client raises RuntimeError for every failed request."""
_PORT = 8265


def connect(address: str | None) -> JobSubmissionClient:
    """Connect to the job server at ``address``, by default at RAY_ADDRESS.

    Raises:
        UsageError: no address is given, or it is not that of a job server.
        ResourceError: the job server does not answer or refuses the token.
    """
    url = _url(address or os.environ.get("RAY_ADDRESS") or "")
    _check_reachable(url)
    # These variables would take precedence over the address.
    with explained(url), environment(RAY_ADDRESS=None, RAY_API_SERVER_ADDRESS=None):
        return JobSubmissionClient(url, headers=_authorization())


@contextmanager
def explained(url: str) -> Iterator[None]:
    """Turn errors of Ray's job client into messages for the user.

    Raises:
        ResourceError: the job server does not answer, refuses the token, or fails.
    """
    try:
        yield
    except AuthenticationError as error:
        said = "rejects the token" if _authorization() else "requires a token"
        raise ResourceError(
            f"the Ray cluster at {url} {said}. Set RAY_AUTH_TOKEN to the cluster's token (there: ray get-auth-token), "
            "or RAY_AUTH_TOKEN_PATH to a file with the token."
        ) from error
    except (requests.RequestException, ConnectionError) as error:
        said = first_line(error).rpartition(": ")[2] if isinstance(error, requests.RequestException) else str(error)
        raise ResourceError(f"no Ray cluster answers at {url}: {said}") from error
    except RuntimeError as error:
        raise ResourceError(f"the Ray cluster at {url} answered: {first_line(error)}") from error


def once_ready(call: Callable[..., object], **arguments: object) -> None:
    """Retry a call that needs a node's agent, for up to a minute: a new head accepts requests before its agent runs.

    Raises:
        RuntimeError: the call failed for another reason, or the agent has not started within a minute.
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
        raise UsageError(
            f"no address of a cluster. Use --address http://HOST:{_PORT}, or set RAY_ADDRESS to the address."
        )
    host = (parts.hostname if "://" in address else address.partition(":")[0]) or "HOST"
    raise UsageError(
        f"{address} is not the address of a job server. Use the address of the cluster's dashboard, "
        f"e.g. --address http://{host}:{_PORT}"
    )


def _check_reachable(url: str) -> None:
    """Open a TCP connection first, because Ray's client waits for minutes.

    Raises:
        ResourceError: the connection failed.
    """
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=_REACH_S).close()
    except OSError as error:
        raise ResourceError(
            f"no Ray cluster answers at {url}: {error.strerror or error}. "
            "Its head needs a dashboard (ray[default], ray start --head --include-dashboard=true)."
        ) from error


def _authorization() -> dict[str, str]:
    """Return the header with the user's token, which Ray's client sends only if RAY_AUTH_MODE is set."""
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

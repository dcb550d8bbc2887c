"""Runs as Ray jobs: the files of the project that are sent, and the cluster's job server."""

import logging
import os
import secrets
import shlex
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from urllib.parse import urlsplit

import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

from pipeline.cluster.code import Package, project_folder, staged, tracked
from pipeline.commands.submit.request import CLOSING_S, Request, is_relative, variables
from pipeline.errors import ResourceError, UsageError
from pipeline.system.process import environment
from pipeline.wording import first_line

for _chatty in (
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
    "ray._private.runtime_env.packaging",
):
    logging.getLogger(_chatty).setLevel(logging.WARNING)  # they set their own level to INFO on import

RUNS = "$HOME/pipeline-runs"
"""Directory of runs on the head if ``tracking.directory`` is relative; Ray deletes a job's working directory."""
_ADDRESSES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
"""Environment variables that take precedence over an address that Ray's client or ``ray job`` gets."""
_REACH_S = 10.0
_PORT = 8265


def connect(address: str | None) -> JobSubmissionClient:
    """Connect to the job server at ``address``, by default at RAY_ADDRESS.

    Raises:
        UsageError: no address is given, or it is not the address of a job server.
        ResourceError: the job server does not answer or refuses the token.
    """
    url = _url(address or os.environ.get("RAY_ADDRESS") or "")
    _check_reachable(url)
    with _explain_errors(url), environment(**dict.fromkeys(_ADDRESSES)):
        return JobSubmissionClient(url)


def submit(client: JobSubmissionClient, request: Request, package: Package) -> str:
    """Submit a run; return the id of its job.

    Raises:
        UsageError: an environment variable to be sent is not set.
        ResourceError: the cluster refuses the job.
    """
    identity = f"{request.name}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    # Ray waits 3 s between SIGTERM and SIGKILL by default, too short for a checkpoint.
    wait_s = int(request.file.experiment.parallel.grace_s) + CLOSING_S
    settings = {"RAY_JOB_STOP_WAIT_TIME_S": str(wait_s), "PYTHONUNBUFFERED": "1"}
    here = Path(os.path.relpath(Path.cwd().resolve(), package.root.resolve()))
    values = variables(request.environment)
    with staged(package) as folder, _explain_errors(client.get_address()):
        client.submit_job(
            entrypoint=entrypoint(request, folder=here),
            submission_id=identity,
            runtime_env={"working_dir": str(folder), "env_vars": {**settings, **values}},
        )
    return identity


def commands_for(job: str, *, url: str) -> Iterator[str]:
    """Yield Ray's commands that follow a job's output, show its status, and stop it."""
    misleading = [name for name in _ADDRESSES if os.environ.get(name, url).rstrip("/") != url]
    ray = " ".join(["env", *(f"-u {name}" for name in misleading), "ray"] if misleading else ["ray"])
    yield f"{ray} job logs {job} --follow --address {url}"
    yield f"{ray} job status {job} --address {url}"
    yield f"{ray} job stop {job} --address {url}"


def pack_experiment(*experiment: Path) -> Package:
    """Collect the files of the project that git tracks.

    Args:
        experiment: the experiment file and the files that it extends.

    Raises:
        UsageError: one of these files is not among them.
        ResourceError: the project is not a git repository, or is too large.
    """
    package = tracked(project_folder())
    root = package.root.resolve()
    for file in experiment:
        path = file.resolve()
        if not path.is_relative_to(root):
            raise UsageError(f"{file}: not in {root}, the folder that is sent to the cluster. Move the file there.")
        if path.relative_to(root) not in package.files:
            raise UsageError(
                f"{file}: git doesn't track this file, so it is not sent. Use git add {file}. A commit isn't needed."
            )
    return package


def entrypoint(request: Request, *, folder: Path) -> str:
    """Return the shell command of the job; ``folder`` is the working directory, relative to the sent code."""
    more = ["parallel.launcher=ray", "parallel.address=auto"]
    if (directory := run_directory(request)) is not None:
        more.append(f'tracking.directory="{directory}"')
    return f"cd {shlex.quote(folder.as_posix())} && {request.command(*more)}"


def run_directory(request: Request) -> str | None:
    """Return the directory on the head for all runs of an experiment; None if the experiment names an absolute one."""
    return f"{RUNS}/{request.name}" if is_relative(request.file.experiment.tracking.directory) else None


@contextmanager
def _explain_errors(url: str) -> Iterator[None]:
    """Turn errors of Ray's job client into messages for the user.

    Raises:
        ResourceError: the job server does not answer, refuses the token, or fails.
    """
    try:
        yield
    except AuthenticationError as error:
        raise ResourceError(
            f"the Ray cluster at {url} answered: {first_line(error)}. Set RAY_AUTH_MODE=token, and "
            "RAY_AUTH_TOKEN to the cluster's token (there: ray get-auth-token) or RAY_AUTH_TOKEN_PATH to its file."
        ) from error
    except (requests.RequestException, ConnectionError) as error:
        raise ResourceError(f"no Ray cluster answers at {url}: {first_line(error).rpartition(': ')[2]}") from error
    except RuntimeError as error:  # raised by Ray's client for every failed request
        raise ResourceError(f"the Ray cluster at {url} answered: {first_line(error)}") from error


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

"""Runs on a Ray cluster: sent there as Ray jobs, looked at, stopped."""

import os
import secrets
import shlex
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from ray.job_submission import JobSubmissionClient

from pipeline.cluster.package import Package, project_folder, staged, tracked
from pipeline.commands.submit import cluster
from pipeline.commands.submit.request import CLOSING_S, Request, is_relative, variables
from pipeline.config.values import Frozen
from pipeline.errors import PipelineError, ResourceError, UsageError
from pipeline.wording import did_you_mean

RUNS = "$HOME/pipeline-runs"
"""On the head, for experiments whose ``tracking.directory`` is relative: a job's own folder doesn't last."""

_EXPERIMENT = "pipeline.experiment"
_NOT_FOUND = 127
"""A shell's exit code for a command that isn't there; what a job prints may say anything."""
_POLL_S = 0.5


class Job(Frozen):
    """What a cluster knows of a job."""

    id: str
    experiment: str | None
    """None: it wasn't sent by ``pipeline submit``."""
    status: Literal["PENDING", "RUNNING", "STOPPED", "SUCCEEDED", "FAILED"]
    began: datetime | None = None
    """When it was sent, in UTC."""
    ended: datetime | None = None
    exit_code: int | None = None
    """Of ``pipeline run``; None while it goes on, if it was stopped, or if it never began."""
    message: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether its status is final."""
        return self.status in ("STOPPED", "SUCCEEDED", "FAILED")


class Jobs:
    """The jobs of one cluster."""

    def __init__(self, address: str | None) -> None:
        """Connects.

        Raises:
            UsageError: there is no such address.
            ResourceError: no cluster answers, or not to us.
        """
        self.client: JobSubmissionClient = cluster.connect(address)
        self.url: str = self.client.get_address()

    def submit(self, request: Request, package: Package) -> str:
        """Send a run; returns the id of its job.

        Raises:
            UsageError: a variable that should go along isn't set.
            ResourceError: the cluster doesn't take it.
        """
        identity = f"{request.name}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
        values = variables(request.environment)
        with staged(package) as folder, cluster.explained(self.url):
            cluster.once_ready(
                self.client.submit_job,
                entrypoint=entrypoint(request, folder=_working_folder(package)),
                submission_id=identity,
                runtime_env={"working_dir": str(folder), "env_vars": {**_settings(request), **values}},
                metadata={_EXPERIMENT: request.name},
            )
        return identity

    def job(self, identity: str) -> Job:
        """What is known of one job.

        Raises:
            UsageError: there is no such job.
            ResourceError: the cluster doesn't answer.
        """
        with cluster.explained(self.url):
            try:
                return _job(self.client.get_job_info(identity))
            except RuntimeError:  # Ray's client has no other type, whatever the server answers
                if identity in (known := [job.id for job in self.all()]):
                    raise
        raise UsageError(f"{self.url} has no job {identity}{did_you_mean(identity, known)}; pipeline status shows all")

    def all(self) -> list[Job]:
        """All that the cluster remembers, the newest last.

        Raises:
            ResourceError: the cluster doesn't answer.
        """
        with cluster.explained(self.url):
            details = self.client.list_jobs()
        jobs = [_job(each) for each in details if each.submission_id]  # others are Ray programs run by hand
        return sorted(jobs, key=lambda job: job.began or datetime.max.replace(tzinfo=UTC))

    def logs(self, identity: str) -> str:
        """What a job has printed so far.

        Raises:
            UsageError: there is no such job.
            ResourceError: the cluster doesn't answer.
        """
        self.job(identity)
        with cluster.explained(self.url):
            return str(self.client.get_job_logs(identity))

    def stop(self, identity: str) -> Job:
        """Ask a job to end with a checkpoint, and wait until it has; one that has ended stays as it is.

        Raises:
            UsageError: there is no such job.
            ResourceError: the cluster doesn't answer.
        """
        if (job := self.job(identity)).has_ended:
            return job
        with cluster.explained(self.url):
            self.client.stop_job(identity)
        return self.wait(identity)

    def wait(self, identity: str) -> Job:
        """A job once it has ended.

        Raises:
            ResourceError: the cluster doesn't answer.
        """
        while not (job := self.job(identity)).has_ended:
            time.sleep(_POLL_S)
        return job


def packed(experiment: Path) -> Package:
    """The files of the project that go along.

    Raises:
        UsageError: the experiment file is not one of them.
        ResourceError: there is no git repository, or too much in it.
    """
    package = tracked(project_folder())
    root = package.root.resolve()
    path = experiment.resolve()
    if not path.is_relative_to(root):
        raise UsageError(f"{experiment}: lies outside of {root}, which is what goes to the cluster; move it there")
    if path.relative_to(root) not in package.files:
        raise UsageError(
            f"{experiment}: git doesn't track this file, so it wouldn't go along; git add {experiment}, "
            "a commit isn't needed"
        )
    return package


def entrypoint(request: Request, *, folder: Path) -> str:
    """What the cluster's head runs in a folder of the code."""
    more = ["parallel.launcher=ray", "parallel.address=auto"]
    if (directory := run_directory(request)) is not None:
        more.append(f'tracking.directory="{directory}"')
    there = f"{{ python -c 'import pipeline' || exit {_NOT_FOUND}; }}"
    return f"cd {shlex.quote(folder.as_posix())} && {there} && {request.command(*more)}"


def run_directory(request: Request) -> str | None:
    """Where the run's folder lies on the head if the experiment doesn't say; the same for each of its jobs."""
    return f"{RUNS}/{request.name}" if is_relative(request.file.experiment.tracking.directory) else None


def failure(job: Job) -> PipelineError | None:
    """Why ``pipeline run`` never ended by itself; None if it did."""
    if job.status != "FAILED":
        return None
    if job.exit_code == _NOT_FOUND:
        return ResourceError(
            f"{job.id}: the python of the cluster's head has no pipeline; install it in the environment or image "
            "that ray start runs in"
        )
    if job.exit_code is None:
        return ResourceError(f"{job.id} could not be started: {job.message.strip()}")
    return None


def tell(job: Job, *, show: Callable[[str], None]) -> None:
    """How a job ended, in a line."""
    code = "" if job.exit_code is None else f" with exit code {job.exit_code}"
    show(f"{job.id}: {job.status}{code}")


def _working_folder(package: Package) -> Path:
    """Where we are, relative to the package's root: the run is to be in the same place."""
    return Path(os.path.relpath(Path.cwd().resolve(), package.root.resolve()))


def _settings(request: Request) -> dict[str, str]:
    """SIGKILL would follow 3 s after SIGTERM, before there is a checkpoint."""
    patience = int(request.file.experiment.parallel.grace_s) + CLOSING_S
    return {"RAY_JOB_STOP_WAIT_TIME_S": str(patience), "PYTHONUNBUFFERED": "1"}


def _job(details: Any) -> Job:
    return Job(
        id=details.submission_id or details.job_id,
        experiment=(details.metadata or {}).get(_EXPERIMENT),
        status=details.status.value,
        began=_time(details.start_time),
        ended=_time(details.end_time),
        exit_code=details.driver_exit_code,
        message=details.message or "",
    )


def _time(milliseconds: int | None) -> datetime | None:
    return datetime.fromtimestamp(milliseconds / 1000, UTC) if milliseconds else None

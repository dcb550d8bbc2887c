"""Runs as Ray jobs: submit, query, stop, and the files of the project that are sent."""

import os
import secrets
import shlex
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from ray.job_submission import JobSubmissionClient

from pipeline.cluster.code import Package, project_folder, staged, tracked
from pipeline.commands.submit import cluster
from pipeline.commands.submit.request import CLOSING_S, Request, is_relative, variables
from pipeline.config.values import Frozen
from pipeline.errors import PipelineError, ResourceError, UsageError
from pipeline.wording import did_you_mean

RUNS = "$HOME/pipeline-runs"
"""Directory of runs on the head if ``tracking.directory`` is relative; Ray deletes a job's working directory."""

_EXPERIMENT = "pipeline.experiment"
_NOT_FOUND = 127
"""The shell's exit code for "command not found"; a job exits with it if the head has no pipeline."""
_POLL_S = 0.5


class Job(Frozen):
    """State of a Ray job."""

    id: str
    experiment: str | None
    """Name of the experiment, or None for a job that ``pipeline submit`` did not send."""
    status: Literal["PENDING", "RUNNING", "STOPPED", "SUCCEEDED", "FAILED"]
    began: datetime | None = None
    """Time of submission, in UTC."""
    ended: datetime | None = None
    exit_code: int | None = None
    """Exit code of ``pipeline run``; None if the job is running, was stopped, or never started."""
    message: str = ""

    @property
    def has_ended(self) -> bool:
        """True if the status is final."""
        return self.status in ("STOPPED", "SUCCEEDED", "FAILED")


class Jobs:
    """The jobs of one cluster.

    Raises:
        UsageError: from a method that takes the id of a job, if there is no such job.
        ResourceError: from each method, if the cluster doesn't answer.
    """

    def __init__(self, address: str | None) -> None:
        """Connect to the cluster's job server.

        Raises:
            UsageError: no address is given, or it is not that of a job server.
            ResourceError: the job server does not answer or refuses the token.
        """
        self.client: JobSubmissionClient = cluster.connect(address)
        self.url: str = self.client.get_address()

    def submit(self, request: Request, package: Package) -> str:
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
        with staged(package) as folder, cluster.explained(self.url):
            cluster.once_ready(
                self.client.submit_job,
                entrypoint=entrypoint(request, folder=here),
                submission_id=identity,
                runtime_env={"working_dir": str(folder), "env_vars": {**settings, **values}},
                metadata={_EXPERIMENT: request.name},
            )
        return identity

    def job(self, identity: str) -> Job:
        """Query a job."""
        with cluster.explained(self.url):
            try:
                return _job(self.client.get_job_info(identity))
            except RuntimeError:  # raised by Ray's client for every failed request
                if identity in (known := [job.id for job in self.all()]):
                    raise
        raise UsageError(f"{self.url} has no job {identity}{did_you_mean(identity, known)}; pipeline status shows all")

    def all(self) -> list[Job]:
        """Return all jobs that the cluster remembers, newest last."""
        with cluster.explained(self.url):
            details = self.client.list_jobs()
        jobs = [
            _job(each) for each in details if each.submission_id
        ]  # without an id: Ray programs that were not submitted as jobs
        return sorted(jobs, key=lambda job: job.began or datetime.max.replace(tzinfo=UTC))

    def logs(self, identity: str) -> str:
        """Return the job's output so far."""
        self.job(identity)
        with cluster.explained(self.url):
            return str(self.client.get_job_logs(identity))

    def stop(self, identity: str) -> Job:
        """Request a checkpoint and the end of a job, and wait for it; a job that has ended is returned unchanged."""
        if (job := self.job(identity)).has_ended:
            return job
        with cluster.explained(self.url):
            self.client.stop_job(identity)
        while not (job := self.job(identity)).has_ended:
            time.sleep(_POLL_S)
        return job


def packed(*experiment: Path) -> Package:
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
    there = f"{{ python -c 'import pipeline' || exit {_NOT_FOUND}; }}"
    return f"cd {shlex.quote(folder.as_posix())} && {there} && {request.command(*more)}"


def run_directory(request: Request) -> str | None:
    """Return the directory on the head for all runs of an experiment; None if the experiment names an absolute one."""
    return f"{RUNS}/{request.name}" if is_relative(request.file.experiment.tracking.directory) else None


def failure(job: Job) -> PipelineError | None:
    """Return the reason why ``pipeline run`` could not be started, or None."""
    if job.status != "FAILED":
        return None
    if job.exit_code == _NOT_FOUND:
        return ResourceError(
            f"{job.id}: the python of the cluster's head has no pipeline. Install it in the environment or image "
            "that runs ray start."
        )
    if job.exit_code is None:
        return ResourceError(f"{job.id} could not be started: {job.message.strip()}")
    return None


def tell(job: Job, *, show: Callable[[str], None]) -> None:
    """Show the id, status and exit code of a job."""
    code = "" if job.exit_code is None else f" with exit code {job.exit_code}"
    show(f"{job.id}: {job.status}{code}")


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

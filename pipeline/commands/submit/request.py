"""A run to be submitted, and checks of what would fail or differ on another machine."""

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from pipeline.config.load import ExperimentFile
from pipeline.config.uris import without_credentials, without_credentials_in
from pipeline.errors import Problem, UsageError

_FROM_ENVIRONMENT = re.compile(r"\$\{oc\.env:\s*([A-Za-z_]\w*)")
_VARIABLE = re.compile(r"[A-Za-z_]\w*")
CLOSING_S = 90
"""Seconds to close a run and to deliver its remaining events to MLflow, after its workers have ended."""
_LOOPBACK = re.compile(r"https?://(localhost|127\.|\[::1\])")


@dataclass(frozen=True, kw_only=True)
class Request:
    """A ``pipeline run`` on another machine, in a copy of the working directory."""

    file: ExperimentFile
    overrides: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    """Options of ``pipeline run``, e.g. "--no-baseline"."""
    environment: tuple[str, ...] = ()
    """Names of environment variables to send."""

    @property
    def name(self) -> str:
        """Name of the experiment."""
        return self.file.experiment.name

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of the environment variables that the experiment reads."""
        return tuple(dict.fromkeys(_FROM_ENVIRONMENT.findall(str(self.file.tree))))

    def command(self, *more: str) -> str:
        """Return the shell command; it uses ``exec``, so that ``pipeline run`` gets SIGTERM and sets the exit code."""
        missing = "set on the machine that sent this job, but not here. Set it here, or send it with --env {0}"
        left = [name for name in self.variables if name in os.environ and name not in self.environment]
        guards = [f': "${{{name}?{missing.format(name)}}}"' for name in left]
        return " && ".join((*guards, f"exec python -m pipeline {self.arguments(*more)}"))

    def arguments(self, *more: str) -> str:
        """Return the arguments of ``pipeline``, quoted for a shell.

        Args:
            more: quoted overrides, which take precedence over the user's.
        """
        file = shlex.quote(os.path.relpath(self.file.path))
        return " ".join(("run", file, *map(shlex.quote, self.overrides), *more, *map(shlex.quote, self.options)))


def check(request: Request) -> None:
    """Check the overrides for passwords, and the names of the variables to send.

    Raises:
        UsageError: an override contains a password, or ``--env`` a value.
    """
    for override in request.overrides:
        if without_credentials_in(override) != override:
            key = override.partition("=")[0]
            raise UsageError(
                f"{key}: contains a password. All users of the cluster could read it in the job's command line. Remove "
                "it, and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD on the cluster's nodes."
            )
    for name in request.environment:
        if not _VARIABLE.fullmatch(name):
            raise UsageError("--env takes the name of a variable, not a value. Use --env NAME.")


def check_lasting(request: Request) -> None:
    """Check that no results go to the job's working directory, which is deleted when the job ends.

    Raises:
        ExperimentError: results would be lost.
    """
    if problems := list(_lost(request)):
        raise request.file.explain(problems)


def variables(names: Sequence[str]) -> dict[str, str]:
    """Return the values of environment variables, by name.

    Raises:
        UsageError: a variable is not set.
    """
    for name in names:
        if name not in os.environ:
            raise UsageError(f"--env {name}: {name} is not set here. Set it, or remove the option.")
    return {name: os.environ[name] for name in names}


def notes(request: Request, *, launcher: str = "ray", same_environment: bool = False) -> Iterator[str]:
    """Describe what differs on the cluster.

    Args:
        request: the run.
        launcher: value of ``parallel.launcher`` there.
        same_environment: True if the job inherits all variables.
    """
    experiment = request.file.experiment
    if experiment.parallel.launcher != launcher:
        yield f"parallel.launcher is {experiment.parallel.launcher}. On the cluster, {launcher} is used."
    for name in request.variables:
        if not (same_environment or name in request.environment):
            yield f"the experiment reads {name} from the cluster's environment. To send its value, use --env {name}."
    uri = experiment.tracking.uri
    if uri.startswith("sqlite:////"):
        yield f"tracking.uri is {uri}. Results stay in this file on the node that runs the driver."
    if _LOOPBACK.match(uri):
        yield f"tracking.uri is {without_credentials(uri)}. On the cluster, this address is another machine."


def cpus_of_worker(request: Request) -> int:
    """Return the cores to request for each worker.

    Raises:
        ExperimentError: ``parallel.cpus_per_worker`` is not set.
    """
    cpus = request.file.experiment.parallel.cpus_per_worker
    if cpus is None:
        message = "missing, and needed to request cores. Set it, e.g. cpus_per_worker: 4"
        raise request.file.explain([Problem("parallel.cpus_per_worker", message)])
    return cpus


def gpus_of_worker(request: Request) -> int:
    """Return the GPUs to request for each worker: none unless ``parallel.device`` is cuda."""
    parallel = request.file.experiment.parallel
    return (parallel.gpus_per_worker or 1) if parallel.device == "cuda" else 0


def is_relative(path: str) -> bool:
    """Return True if a path depends on the working directory."""
    return "://" not in path and not path.startswith(("/", "~"))


def _lost(request: Request) -> Iterator[Problem]:
    experiment = request.file.experiment
    uri = experiment.tracking.uri
    if uri.startswith("sqlite:///") and not PurePath(uri.removeprefix("sqlite:///")).is_absolute():
        yield Problem(
            "tracking.uri",
            f"is {uri}, a file in the job's working directory, which is deleted with the job. "
            "Set the address of a server, e.g. tracking.uri=http://HOST:5000",
        )
    directory = experiment.checkpoint.directory
    if directory is not None and is_relative(directory):
        yield Problem(
            "checkpoint.directory",
            f"is {directory}, a folder in the job's working directory, which is deleted with the job. "
            "Set an absolute path on shared storage, or an address such as s3://bucket/folder.",
        )

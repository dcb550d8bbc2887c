"""The KubeRay manifest: a ``RayJob`` with a cluster of pods for a single run. The image contains the code."""

import re
import secrets
from dataclasses import dataclass
from importlib.metadata import version

from pipeline.commands.submit.request import CLOSING_S, Request, cpus_of_worker, gpus_of_worker, is_relative
from pipeline.commands.submit.templates import fill
from pipeline.errors import Problem, UsageError

_MOUNT = "/etc/pipeline"
_RUNS = "/runs"
_LONGEST_NAME = 40  # KubeRay derives names of services from it, which may have 63 characters
_QUANTITY = re.compile(r"[1-9]\d*([KMGT]i?)?")
_OBJECT = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class Pods:
    """Settings of the pods, which the experiment file does not contain."""

    image: str
    """Image with pipeline, ray[default] and the project; its working directory is the project's folder."""
    memory: str = "8Gi"
    """Memory of each worker, as a Kubernetes quantity."""
    claim: str | None = None
    """PersistentVolumeClaim for runs and checkpoints, writable by all pods."""
    secret: str = "pipeline"  # noqa: S105 - a name
    """Secret with the values of the variables in ``Request.environment``."""


def manifest(request: Request, pods: Pods) -> str:
    """Return the YAML for ``kubectl create``: a ConfigMap with the experiment, and the RayJob.

    Raises:
        UsageError: Kubernetes would refuse a name or a quantity.
        ExperimentError: the experiment lacks a setting that pods need.
    """
    _check(request, pods)
    experiment = request.file.experiment
    directory = _RUNS if is_relative(experiment.tracking.directory) else experiment.tracking.directory
    more = ("parallel.launcher=ray", "parallel.address=auto", "parallel.ship_code=false")
    return fill(
        "kuberay.yaml.jinja",
        name=f"{_object_name(request.name)}-{secrets.token_hex(2)}",
        experiment=request.name,
        yaml=request.text.rstrip("\n") + "\n",
        entrypoint=request.command(*more, f"tracking.directory={directory}", path=f"{_MOUNT}/experiment.yaml"),
        ray=version("ray"),
        mount=_MOUNT,
        directory=directory,
        workers=experiment.parallel.workers,
        cpus=cpus_of_worker(request),
        gpus=gpus_of_worker(request),
        stop_wait_s=int(experiment.parallel.grace_s) + CLOSING_S,
        variables=request.environment,
        image=pods.image,
        memory=pods.memory,
        claim=pods.claim,
        secret=pods.secret,
    )


def _check(request: Request, pods: Pods) -> None:
    if not _QUANTITY.fullmatch(pods.memory):
        raise UsageError(f"--memory {pods.memory}: write an amount such as 8Gi or 500M")
    for option, name in (("--claim", pods.claim), ("--secret", pods.secret)):
        if name is not None and not _OBJECT.fullmatch(name):
            raise UsageError(f"{option} {name}: no valid name in Kubernetes; use lower-case letters, digits, - and .")
    checkpoint = request.file.experiment.checkpoint
    if pods.claim is None and checkpoint.keep and "://" not in (checkpoint.directory or ""):
        message = (
            "no storage that all pods share and that outlives them; add --claim NAME of a PersistentVolumeClaim "
            "(ReadWriteMany), or write an address such as checkpoint.directory=s3://bucket/folder"
        )
        raise request.file.explain([Problem("checkpoint.directory", message)])


def _object_name(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower())[:_LONGEST_NAME].strip("-")

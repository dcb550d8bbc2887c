"""A run as a KubeRay ``RayJob``: a cluster of pods for this run only. The code is in their image."""

import re
import secrets
from dataclasses import dataclass
from importlib.metadata import version

from pipeline.commands.submit.request import CLOSING_S, Request, cpus_of_worker, gpus_of_worker, is_relative
from pipeline.commands.submit.templates import fill
from pipeline.errors import Problem, UsageError

_MOUNT = "/etc/pipeline"
_RUNS = "/runs"
_LONGEST_NAME = 40  # KubeRay makes names of services from it, of 63 characters at most
_QUANTITY = re.compile(r"[1-9]\d*([KMGT]i?)?")
_OBJECT = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class Pods:
    """What an experiment doesn't say about the pods that it runs in."""

    image: str
    """Has pipeline, ray[default] and the project; its working directory is the project's folder."""
    memory: str = "8Gi"
    """Of each worker."""
    claim: str | None = None
    """A PersistentVolumeClaim that all pods can write, for runs and checkpoints."""
    secret: str = "pipeline"  # noqa: S105 - a name
    """The Secret that has the values of ``Request.environment``."""


def manifest(request: Request, pods: Pods) -> str:
    """The YAML for ``kubectl create``: a ConfigMap with the experiment, and the RayJob.

    Raises:
        UsageError: a name or an amount that Kubernetes would refuse.
        ExperimentError: something is missing that pods need.
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
            raise UsageError(f"{option} {name}: Kubernetes has no such names; lower-case letters, digits, - and .")
    checkpoint = request.file.experiment.checkpoint
    if pods.claim is None and checkpoint.keep and "://" not in (checkpoint.directory or ""):
        message = (
            "no place that outlives the pods and that all of them reach; add --claim NAME of a PersistentVolumeClaim "
            "(ReadWriteMany), or write an address such as checkpoint.directory=s3://bucket/folder"
        )
        raise request.file.explain([Problem("checkpoint.directory", message)])


def _object_name(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower())[:_LONGEST_NAME].strip("-")

"""Files that start a run elsewhere, rendered from the templates in this folder.

A ``RayJob`` for KubeRay, with a cluster of pods for a single run, whose image contains the code; and a script for
``sbatch``, which starts Ray, torchrun or the ranks themselves on the nodes of the allocation.
"""

import json
import re
import secrets
import shlex
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.resources import files
from typing import Literal

from jinja2 import Environment, StrictUndefined

from pipeline.commands.submit.request import CLOSING_S, Request, cpus_of_worker, gpus_of_worker, is_relative
from pipeline.errors import Problem, UsageError
from pipeline.recording.journal import FILE_NAME

_MOUNT = "/etc/pipeline"
_RUNS = "/runs"
_LONGEST_NAME = 40  # KubeRay derives names of services from it, which may have 63 characters
_QUANTITY = re.compile(r"[1-9]\d*([KMGT]i?)?")
_OBJECT = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_LEAST_NOTICE_S = 120
SlurmLauncher = Literal["ray", "torchrun", "srun"]


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


def kuberay_job(request: Request, pods: Pods) -> str:
    """Return the YAML for ``kubectl create``: a ConfigMap with the experiment, and the RayJob.

    Raises:
        UsageError: Kubernetes would refuse a name or a quantity.
        ExperimentError: the experiment lacks a setting that pods need.
    """
    _check_pods(request, pods)
    experiment = request.file.experiment
    directory = _RUNS if is_relative(experiment.tracking.directory) else experiment.tracking.directory
    more = ("parallel.launcher=ray", "parallel.address=auto", "parallel.ship_code=false")
    return _filled(
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


def _check_pods(request: Request, pods: Pods) -> None:
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


def slurm_script(request: Request, *, nodes: int | None = None, launcher: SlurmLauncher = "ray") -> str:
    """Return the text of the script for ``sbatch``.

    Args:
        request: the run; its folder is on storage that all nodes share, so no code is sent.
        nodes: number of nodes of the allocation; default: one for each worker.
        launcher: program that starts the workers: ray, torchrun on each node, or srun itself.

    Raises:
        UsageError: the workers can't be dealt to the nodes, or there are variables to send, which Slurm does by itself.
        ExperimentError: the experiment lacks a setting that an allocation needs.
    """
    workers = request.file.experiment.parallel.workers
    nodes = nodes or workers
    if nodes > workers:
        raise UsageError(
            f"--nodes {nodes}: more nodes than workers (parallel.workers is {workers}). Use at most {workers}."
        )
    if request.environment:
        raise UsageError("--env: sbatch sends all environment variables. Remove the option.")
    if launcher != "ray" and workers % nodes:
        raise UsageError(
            f"--nodes {nodes}: {launcher} starts the same number of workers on each node, and parallel.workers is "
            f"{workers}. Use a number of nodes that divides {workers}."
        )
    on_each = -(-workers // nodes)
    tasks = on_each if launcher == "srun" else 1
    return _filled(
        "slurm.sh.jinja",
        experiment=request.name,
        launcher=launcher,
        nodes=nodes,
        tasks=tasks,
        on_each=on_each,
        closing_s=CLOSING_S,
        cpus=on_each // tasks * cpus_of_worker(request),
        gpus=on_each * gpus_of_worker(request),
        notice_s=max(_LEAST_NOTICE_S, int(request.file.experiment.parallel.grace_s) + CLOSING_S),
        arguments=request.arguments(*(["parallel.ship_code=false"] if launcher == "ray" else [])),
        resumes=any(option.startswith("--resume") for option in request.options),
        directory=shlex.quote(request.file.experiment.tracking.directory),
        journal=FILE_NAME,
    )


def _filled(template: str, /, **values: object) -> str:
    """Render a template; the filter ``quoted`` writes a value as a YAML string."""
    environment = Environment(  # noqa: S701 - no HTML: values are quoted for YAML or the shell
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        comment_start_string="{%#",  # {# has a meaning in the shell
        comment_end_string="#%}",
    )
    environment.filters["quoted"] = partial(json.dumps, ensure_ascii=False)
    return environment.from_string(files("pipeline.commands.submit").joinpath(template).read_text("utf-8")).render(
        values
    )

"""The script for ``sbatch``, which starts Ray, torchrun or the ranks themselves on the nodes of the allocation."""

import shlex
from importlib.resources import files
from typing import Literal

from jinja2 import Environment, StrictUndefined

from pipeline.commands.submit.request import CLOSING_S, Request, cpus_of_worker, gpus_of_worker
from pipeline.errors import UsageError
from pipeline.recording.journal.journal import FILE_NAME

_LEAST_NOTICE_S = 120
SlurmLauncher = Literal["ray", "torchrun", "srun"]


def format_script(request: Request, *, nodes: int | None = None, launcher: SlurmLauncher = "ray") -> str:
    """Return the text of the script for ``sbatch``.

    Args:
        request: the run; its folder is on storage that all nodes share, so no code is sent.
        nodes: number of nodes of the allocation; default: one for each worker.
        launcher: program that starts the workers: ray, torchrun on each node, or srun itself.

    Raises:
        UsageError: the workers can't be divided over the nodes, or variables are given, which Slurm sends by itself.
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
    template = Environment(  # noqa: S701 - no HTML: values are quoted for the shell
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        comment_start_string="{%#",  # {# has a meaning in the shell
        comment_end_string="#%}",
    ).from_string(files("pipeline.commands.submit").joinpath("slurm.sh.jinja").read_text("utf-8"))
    return template.render(
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

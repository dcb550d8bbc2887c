"""The script for ``sbatch``: starts Ray on the nodes of the allocation, for a single run."""

import shlex

from pipeline.commands.submit.request import CLOSING_S, Request, cpus_of_worker, gpus_of_worker
from pipeline.commands.submit.templates import fill
from pipeline.errors import UsageError
from pipeline.recording.journal import FILE_NAME

_LEAST_NOTICE_S = 120


def script(request: Request, *, nodes: int | None = None) -> str:
    """Return the text of the script.

    Args:
        request: the run; its folder is on storage that all nodes share, so no code is sent.
        nodes: number of nodes of the allocation; default: one for each worker.

    Raises:
        UsageError: there are more nodes than workers, or variables to send, which Slurm does by itself.
        ExperimentError: the experiment lacks a setting that an allocation needs.
    """
    workers = request.file.experiment.parallel.workers
    nodes = nodes or workers
    if nodes > workers:
        raise UsageError(
            f"--nodes {nodes}: more nodes than workers (parallel.workers is {workers}); write {workers} or fewer"
        )
    if request.environment:
        raise UsageError("--env: sbatch passes on all environment variables; leave the option out")
    on_each = -(-workers // nodes)
    return fill(
        "slurm.sh.jinja",
        experiment=request.name,
        nodes=nodes,
        cpus=on_each * cpus_of_worker(request),
        gpus=on_each * gpus_of_worker(request),
        notice_s=max(_LEAST_NOTICE_S, int(request.file.experiment.parallel.grace_s) + CLOSING_S),
        arguments=request.arguments("parallel.ship_code=false"),
        resumes=any(option.startswith("--resume") for option in request.options),
        directory=shlex.quote(request.file.experiment.tracking.directory),
        journal=FILE_NAME,
    )

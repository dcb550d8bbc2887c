"""The command ``submit``: a run as a job of a cluster."""

from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.arguments import AllowChanged, Baseline, FileArgument, Overrides, Resume, TrainOnly
from pipeline.errors import UsageError
from pipeline.system.imports import undisturbed

if TYPE_CHECKING:
    from pipeline.commands.submit.request import Request

Address = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Dashboard of the cluster, http://HOST:8265. Default: RAY_ADDRESS."),
]


class SlurmLauncher(StrEnum):
    """Program that starts the workers of a Slurm job."""

    ray = "ray"
    torchrun = "torchrun"
    srun = "srun"


def submit(
    file: FileArgument,
    overrides: Overrides = None,
    *,
    address: Address = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Environment variable to send. Anyone with access to the cluster can read it."
        ),
    ] = None,
    baseline: Baseline = True,
    train_only: TrainOnly = False,
    resume: Resume = None,
    allow_changed: AllowChanged = False,
    slurm: Annotated[bool, typer.Option("--slurm", help="Print a script for sbatch instead of submitting.")] = False,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", rich_help_panel="Options of --slurm", help="Number of nodes. Default: one per worker."
        ),
    ] = None,
    launcher: Annotated[
        SlurmLauncher | None,
        typer.Option(
            rich_help_panel="Options of --slurm",
            help="Program that starts the workers: ray (default), torchrun on each node, or srun.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run an experiment on a cluster as a job, independently of this machine."""
    from pipeline.commands.submit import request as requests
    from pipeline.config.load import load

    _check_options(slurm=slurm, nodes=nodes, launcher=launcher)
    request = requests.Request(
        file=load(file, overrides or []),
        overrides=tuple(overrides or ()),
        options=tuple(_options(baseline=baseline, train_only=train_only, resume=resume, allow_changed=allow_changed)),
        environment=tuple(env or ()),
    )
    requests.check(request)
    if not slurm:
        requests.check_lasting(request)
    there = "torchrun" if launcher in (SlurmLauncher.torchrun, SlurmLauncher.srun) else "ray"
    for note in requests.notes(request, launcher=there, same_environment=slurm):
        typer.echo(f"note: {note}", err=True)
    if slurm:
        _print(request, nodes=nodes, launcher=launcher or SlurmLauncher.ray)
    else:
        _send(request, address=address)


def _options(*, baseline: bool, train_only: bool, resume: str | None, allow_changed: bool) -> Iterator[str]:
    if not baseline:
        yield "--no-baseline"
    if train_only:
        yield "--train-only"
    if resume is not None:
        yield f"--resume={resume}"
    if allow_changed:
        yield "--allow-changed"


def _check_options(*, slurm: bool, nodes: int | None, launcher: SlurmLauncher | None) -> None:
    """Refuse options that would have no effect."""
    if nodes is not None and not slurm:
        raise UsageError("--nodes needs --slurm. Add --slurm, or remove --nodes.")
    if launcher is not None and not slurm:
        raise UsageError("--launcher needs --slurm. Add --slurm, or set parallel.launcher=NAME.")


def _print(request: "Request", *, nodes: int | None, launcher: SlurmLauncher) -> None:
    from pipeline.commands.submit import slurm_script

    with undisturbed():
        from pipeline.driver import preflight

    preflight.check(request.file, with_weights=False)
    typer.echo(slurm_script.format_script(request, nodes=nodes, launcher=launcher.value), nl=False)


def _send(request: "Request", *, address: str | None) -> None:
    with undisturbed():
        from pipeline.commands.submit import ray_job
        from pipeline.driver import preflight

    preflight.check(request.file, with_weights=False)
    package = ray_job.pack_experiment(request.file.path, *request.file.bases)
    for path in package.untracked_code:
        typer.echo(f"note: {path} is not sent, because git does not track it", err=True)
    client = ray_job.connect(address)
    url = client.get_address()
    typer.echo(f"sending {package} to {url}", err=True)
    job = ray_job.submit(client, request, package)
    if (directory := ray_job.run_directory(request)) is not None:
        typer.echo(
            f"The run's folder is in {directory} on the head node. To change that, set tracking.directory=FOLDER.",
            err=True,
        )
    typer.echo(job)
    for command in ray_job.commands_for(job, url=url):
        typer.echo(command, err=True)

"""Commands for jobs on a cluster: ``submit``, ``status``, ``logs`` and ``stop``."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.arguments import AllowChanged, Baseline, FileArgument, IdsOnly, Json, Overrides, Resume, TrainOnly
from pipeline.errors import Interrupted, Terminated, UsageError
from pipeline.system.imports import undisturbed

if TYPE_CHECKING:
    from datetime import datetime

    from pipeline.commands.submit.jobs import Job, Jobs
    from pipeline.commands.submit.request import Request

_STOPPED = 143

Address = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Dashboard of the cluster, http://HOST:8265. Default: RAY_ADDRESS."),
]
JobArgument = Annotated[str, typer.Argument(metavar="ID", help="Id of a job, as shown by pipeline status.")]


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
    follow: Annotated[bool, typer.Option(help="Show the job's output until it ends.")] = True,
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
        _send(request, address=address, follow=follow)


def logs(
    job: JobArgument,
    *,
    address: Address = None,
    follow: Annotated[bool, typer.Option("--follow", help="Follow the output until the job ends.")] = False,
) -> None:
    """Show the output of a job on a cluster."""
    from pipeline.commands.submit.jobs import Jobs

    jobs = Jobs(address)
    if follow:
        _follow_to_the_end(jobs, job)
    typer.echo(jobs.logs(job), nl=False)


def stop(job: JobArgument, *, address: Address = None) -> None:
    """Stop a job on a cluster after a checkpoint."""
    from pipeline.commands.submit.jobs import Jobs, tell

    jobs = Jobs(address)
    if jobs.job(job).has_ended:
        tell(jobs.job(job), show=typer.echo)
        return
    typer.echo(f"{job}: stop requested; it writes a checkpoint first", err=True)
    with _leaving("stopped waiting", jobs, job):
        tell(jobs.stop(job), show=typer.echo)


def status(
    job: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="Id of a job; default: all jobs.", show_default=False)
    ] = None,
    *,
    address: Address = None,
    as_json: Json = False,
    quiet: IdsOnly = False,
) -> None:
    """Show all jobs of a cluster, or one job."""
    from pipeline.commands.submit.jobs import Jobs

    jobs = Jobs(address)
    found = [jobs.job(job)] if job else jobs.all()
    if as_json:
        typer.echo(json.dumps([each.model_dump(mode="json") for each in found], indent=2))
    elif quiet:
        typer.echo("".join(f"{each.id}\n" for each in found), nl=False)
    else:
        _print_table(found)


def _follow_to_the_end(jobs: "Jobs", job: str, *, first: str = "") -> None:
    """Show ``first`` and the job's output; exit with the exit code of the job."""
    from pipeline.commands.submit.following import follow
    from pipeline.commands.submit.jobs import failure, tell

    with _leaving("stopped following", jobs, job):
        if first:
            typer.echo(first)
        ended = follow(jobs, job, show=lambda text: typer.echo(text, nl=False))
    if (error := failure(ended)) is not None:
        raise error
    tell(ended, show=lambda line: typer.echo(line, err=True))
    raise typer.Exit(_STOPPED if ended.status == "STOPPED" else ended.exit_code or 0)


@contextmanager
def _leaving(what: str, jobs: "Jobs", job: str) -> Iterator[None]:
    """End the wait at Ctrl-C, but not the job."""
    try:
        yield
    except KeyboardInterrupt as error:
        code = _STOPPED if isinstance(error, Terminated) else 130
        raise Interrupted(f"{what}; the job continues.\n{_commands_for(jobs, job)}", exit_code=code) from None


def _commands_for(jobs: "Jobs", job: str) -> str:
    """Return the commands to follow, query and stop a job."""
    return "\n".join(
        f"{what:<9} pipeline {command} {job} {option}--address {jobs.url}"
        for what, command, option in (
            ("output", "logs", "--follow "),
            ("status", "status", ""),
            ("stop it", "stop", ""),
        )
    )


def _print_table(jobs: "list[Job]") -> None:
    import rich.console

    from pipeline.recording.terminal import listing, print_table

    columns: list[tuple[str, Callable[[Job], str]]] = [
        ("id", lambda job: job.id),
        ("experiment", lambda job: job.experiment or "-"),
        ("status", lambda job: job.status),
        ("exit code", lambda job: "-" if job.exit_code is None else str(job.exit_code)),
        ("since", lambda job: _local_time(job.ended or job.began)),
    ]
    print_table(listing(columns, jobs), console=rich.console.Console(highlight=False))


def _local_time(time: "datetime | None") -> str:
    return f"{time.astimezone():%Y-%m-%d %H:%M:%S}" if time else "-"


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
    from pipeline.commands.submit import manifests

    with undisturbed():
        from pipeline.driver import preflight

    preflight.check(request.file, with_weights=False)
    typer.echo(manifests.slurm_script(request, nodes=nodes, launcher=launcher.value), nl=False)


def _send(request: "Request", *, address: str | None, follow: bool) -> None:
    with undisturbed():
        from pipeline.commands.submit.jobs import Jobs, packed, run_directory
        from pipeline.driver import preflight

    preflight.check(request.file, with_weights=False)
    package = packed(request.file.path, *request.file.bases)
    for path in package.untracked_code:
        typer.echo(f"note: {path} is not sent, because git does not track it", err=True)
    jobs = Jobs(address)
    typer.echo(f"sending {package} to {jobs.url}", err=True)
    job = jobs.submit(request, package)
    if (directory := run_directory(request)) is not None:
        typer.echo(
            f"The run's folder is in {directory} on the head node. To change that, set tracking.directory=FOLDER.",
            err=True,
        )
    if follow:
        _follow_to_the_end(jobs, job, first=job)
    typer.echo(job)
    typer.echo(_commands_for(jobs, job), err=True)

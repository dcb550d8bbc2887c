"""The command that runs an experiment elsewhere."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.arguments import FileArgument, Overrides, Resume
from pipeline.cli.jobs import Address, follow_to_the_end, how_to_go_on
from pipeline.errors import UsageError
from pipeline.system.imports import undisturbed

if TYPE_CHECKING:
    from pipeline.commands.submit.request import Request


def submit(
    file: FileArgument,
    overrides: Overrides = None,
    *,
    address: Address = None,
    follow: Annotated[bool, typer.Option(help="Show the run's output until it ends.")] = True,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A variable to take along; whoever reaches the cluster can read it."),
    ] = None,
    baseline: Annotated[bool, typer.Option(help="Measure the baseline that the speedup is relative to.")] = True,
    resume: Resume = None,
    allow_changed: Annotated[
        bool, typer.Option("--allow-changed", help="Resume although the experiment has changed.")
    ] = False,
    kuberay: Annotated[bool, typer.Option("--kuberay", help="Print a RayJob for Kubernetes, send nothing.")] = False,
    image: Annotated[str | None, typer.Option(help="Of the pods: has pipeline and the project.")] = None,
    claim: Annotated[str | None, typer.Option(help="PersistentVolumeClaim for runs and checkpoints.")] = None,
    memory: Annotated[str | None, typer.Option(help="Of each worker's pod; default: 8Gi.")] = None,
    secret_name: Annotated[
        str | None, typer.Option("--secret", help="Secret with the values for --env; default: pipeline.")
    ] = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="Print a script for sbatch, send nothing.")] = False,
    nodes: Annotated[int | None, typer.Option(min=1, help="Of the allocation; default: one for each worker.")] = None,
) -> None:
    """Run an experiment on a cluster; it goes on without this machine."""
    from pipeline.commands.submit import request as requests
    from pipeline.config.load import load

    pods = {"image": image, "claim": claim, "memory": memory, "secret": secret_name}
    _check_options(kuberay=kuberay, slurm=slurm, pods=pods, nodes=nodes)
    request = requests.Request(
        file=load(file, overrides or []),
        overrides=tuple(overrides or ()),
        options=tuple(_options(baseline=baseline, resume=resume, allow_changed=allow_changed)),
        environment=tuple(env or ()),
    )
    requests.check(request)
    if not slurm:
        requests.check_lasting(request)
    for note in requests.notes(request, same_environment=slurm):
        typer.echo(f"note: {note}", err=True)
    if kuberay or slurm:
        _print(request, pods={name: value for name, value in pods.items() if value is not None}, nodes=nodes)
    else:
        _send(request, address=address, follow=follow)


def _options(*, baseline: bool, resume: str | None, allow_changed: bool) -> Iterator[str]:
    if not baseline:
        yield "--no-baseline"
    if resume is not None:
        yield f"--resume={resume}"
    if allow_changed:
        yield "--allow-changed"


def _check_options(*, kuberay: bool, slurm: bool, pods: Mapping[str, str | None], nodes: int | None) -> None:
    """Options that would be ignored are refused."""
    if kuberay and slurm:
        raise UsageError("--kuberay and --slurm are two things; choose one")
    if kuberay and pods["image"] is None:
        raise UsageError("--kuberay needs --image, with pipeline and the project in it")
    given = next((name for name, value in pods.items() if value is not None), None)
    if given and not kuberay:
        raise UsageError(f"--{given} is for --kuberay; leave it out, or add that")
    if nodes is not None and not slurm:
        raise UsageError("--nodes is for --slurm; leave it out, or add that")


def _print(request: "Request", *, pods: dict[str, str], nodes: int | None) -> None:
    from pipeline.commands.submit import kuberay, slurm

    with undisturbed():
        from pipeline.driver import preflight

    preflight.check(request.file)
    text = kuberay.manifest(request, kuberay.Pods(**pods)) if pods else slurm.script(request, nodes=nodes)
    typer.echo(text, nl=False)


def _send(request: "Request", *, address: str | None, follow: bool) -> None:
    with undisturbed():
        from pipeline.commands.submit.jobs import Jobs, packed, run_directory
        from pipeline.driver import preflight

    preflight.check(request.file)
    package = packed(request.file.path)
    for path in package.untracked_code:
        typer.echo(f"note: git doesn't track {path}: it stays here", err=True)
    jobs = Jobs(address)
    typer.echo(f"sending {package} to {jobs.url}", err=True)
    job = jobs.submit(request, package)
    if (directory := run_directory(request)) is not None:
        typer.echo(f"its folder will be in {directory} of the head; tracking.directory=FOLDER changes that", err=True)
    if follow:
        follow_to_the_end(jobs, job, first=job)
    typer.echo(job)
    typer.echo(how_to_go_on(jobs, job), err=True)

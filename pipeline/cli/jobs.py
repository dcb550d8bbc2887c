"""Commands that look at runs on a cluster, and stop them."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.arguments import Json
from pipeline.errors import Interrupted, Terminated

if TYPE_CHECKING:
    from datetime import datetime

    from pipeline.commands.submit.jobs import Job, Jobs

_STOPPED = 143

Address = Annotated[
    str | None,
    typer.Option(metavar="URL", help="The cluster's dashboard, http://HOST:8265; default: RAY_ADDRESS."),
]
JobArgument = Annotated[str, typer.Argument(metavar="ID", help="A job, as pipeline status shows it.")]


def logs(
    job: JobArgument,
    *,
    address: Address = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the job ends.")] = False,
) -> None:
    """Show what a job on a cluster has printed."""
    from pipeline.commands.submit.jobs import Jobs

    jobs = Jobs(address)
    if follow:
        follow_to_the_end(jobs, job)
    typer.echo(jobs.logs(job), nl=False)


def stop(job: JobArgument, *, address: Address = None) -> None:
    """End a job on a cluster, with a checkpoint."""
    from pipeline.commands.submit.jobs import Jobs, tell

    jobs = Jobs(address)
    if jobs.job(job).has_ended:
        tell(jobs.job(job), show=typer.echo)
        return
    typer.echo(f"{job}: asked to stop; it writes a checkpoint first", err=True)
    with _leaving("stopped waiting", jobs, job):
        tell(jobs.stop(job), show=typer.echo)


def status(
    job: Annotated[str | None, typer.Argument(metavar="[ID]", help="A job; default: all.", show_default=False)] = None,
    *,
    address: Address = None,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print ids only.")] = False,
) -> None:
    """Show the jobs of a cluster, or one."""
    from pipeline.commands.submit.jobs import Jobs

    jobs = Jobs(address)
    found = [jobs.job(job)] if job else jobs.all()
    if as_json:
        typer.echo(json.dumps([each.model_dump(mode="json") for each in found], indent=2))
    elif quiet:
        typer.echo("".join(f"{each.id}\n" for each in found), nl=False)
    else:
        _print_table(found)


def follow_to_the_end(jobs: "Jobs", job: str, *, first: str = "") -> None:
    """Show a line, if there is one, and a job's output, and end as it does."""
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
    """Ctrl-C ends the wait, not the job."""
    try:
        yield
    except KeyboardInterrupt as error:
        code = _STOPPED if isinstance(error, Terminated) else 130
        raise Interrupted(f"{what}; the job goes on.\n{how_to_go_on(jobs, job)}", exit_code=code) from None


def how_to_go_on(jobs: "Jobs", job: str) -> str:
    """The commands for a job that nobody follows."""
    return "\n".join(
        f"{what:<9} pipeline {command} {job} {option}--address {jobs.url}"
        for what, command, option in (("output", "logs", "--follow "), ("state", "status", ""), ("end it", "stop", ""))
    )


def _print_table(jobs: "list[Job]") -> None:
    import rich.console

    from pipeline.recording.text_tables import listing, print_table

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

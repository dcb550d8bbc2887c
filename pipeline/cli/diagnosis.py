"""The command ``doctor``: checks of the machine and the cluster."""

from typing import Annotated

import typer

from pipeline.cli import completion
from pipeline.cli.arguments import Json, interruptible


def doctor(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE]",
            help="Experiment file; its tracking store and cluster are examined, too.",
            show_default=False,
            autocompletion=completion.files,
        ),
    ] = None,
    *,
    address: Annotated[
        str | None, typer.Option(help="Ray cluster to examine; default: that of FILE, or RAY_ADDRESS.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check this machine or a cluster; each problem is shown with its fix."""
    import rich.console

    from pipeline.commands.doctor.examination import examine, show
    from pipeline.config.load import load
    from pipeline.config.parallel import Parallel

    experiment = load(file).experiment if file is not None else None
    parallel = experiment.parallel if experiment else Parallel(launcher="ray")
    if address is not None:
        parallel = parallel.model_copy(update={"launcher": "ray", "address": address})
    with interruptible():
        examination = examine(
            parallel,
            uri=experiment.tracking.uri if experiment else None,
            say=lambda what: typer.echo(what, err=True),
        )
    if as_json:
        typer.echo(examination.model_dump_json(indent=2))
    else:
        show(examination, terminal=rich.console.Console(highlight=False))
    if examination.problems:
        raise typer.Exit(3)

"""``pipeline sweep``: hyperparameter search."""

from typing import Annotated

import typer

from pipeline.cli import completion
from pipeline.cli.arguments import (
    Cluster,
    DryRun,
    FileArgument,
    Json,
    Overrides,
    Quiet,
    Verbose,
    interruptible,
    with_address,
)
from pipeline.system.imports import undisturbed

ResumeSweep = Annotated[
    str | None,
    typer.Option(
        "--resume",
        metavar="[RUN]",
        help="Resume an interrupted sweep: RUN, or the newest sweep of this experiment.",
        autocompletion=completion.runs,
    ),
]


def sweep(
    file: FileArgument,
    overrides: Overrides = None,
    *,
    dry_run: DryRun = False,
    resume: ResumeSweep = None,
    as_json: Json = False,
    quiet: Quiet = False,
    address: Cluster = None,
    verbose: Verbose = False,
) -> None:
    """Search hyperparameters: train the trials of the file's sweep in parallel and find the best."""
    from pipeline.config.load import load
    from pipeline.recording.terminal import Terminal

    given = with_address(overrides, address)
    experiment = load(file, given)
    with undisturbed():
        from pipeline.commands.sweep import planning

    if dry_run:
        typer.echo(planning.describe(planning.make(experiment)))
        return
    from pipeline.commands.sweep.run_sweep import sweep as run_sweep

    with interruptible():
        run_sweep(
            experiment,
            overrides=given,
            resume=resume,
            verbose=verbose,
            terminal=Terminal.of(as_json=as_json, quiet=quiet),
            show=lambda report: typer.echo(report.swept.model_dump_json(indent=2)) if as_json else None,
        )

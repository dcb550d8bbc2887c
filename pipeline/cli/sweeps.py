"""``pipeline sweep``: train with other values, side by side."""

from typing import Annotated

import typer

from pipeline.cli import completion
from pipeline.cli.arguments import (
    Cluster,
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
        help="Go on with an interrupted sweep: the newest one of this experiment, or RUN.",
        autocompletion=completion.runs,
    ),
]


def sweep(
    file: FileArgument,
    overrides: Overrides = None,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and start nothing.")] = False,
    resume: ResumeSweep = None,
    as_json: Json = False,
    quiet: Quiet = False,
    address: Cluster = None,
    verbose: Verbose = False,
) -> None:
    """Train with the values of the file's sweep, trials side by side, and find the best."""
    from pipeline.config.load import load
    from pipeline.recording.terminal import Terminal

    given = with_address(overrides, address)
    experiment = load(file, given)  # before torch is imported: a typo is answered at once
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

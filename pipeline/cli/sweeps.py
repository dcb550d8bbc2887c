"""``pipeline sweep``: hyperparameter search."""

import typer

from pipeline.cli.arguments import (
    Cluster,
    DryRun,
    FileArgument,
    Json,
    Overrides,
    Quiet,
    Resume,
    Verbose,
    interruptible,
    with_address,
)
from pipeline.system.imports import undisturbed


def sweep(
    file: FileArgument,
    overrides: Overrides = None,
    *,
    dry_run: DryRun = False,
    resume: Resume = None,
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

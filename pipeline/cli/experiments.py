"""Commands that run and measure an experiment on this machine or on a Ray cluster."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import typer

from pipeline.cli.arguments import (
    AllowChanged,
    Baseline,
    Cluster,
    DryRun,
    FileArgument,
    Json,
    Overrides,
    Quick,
    Quiet,
    Resume,
    TrainOnly,
    Verbose,
    head_start,
    opened,
    print_json,
    with_address,
)
from pipeline.system import begin_stage, end_stage, undisturbed

if TYPE_CHECKING:
    from pipeline.experiment.load import ExperimentFile


def run(
    file: FileArgument,
    overrides: Overrides = None,
    *,
    dry_run: DryRun = False,
    baseline: Baseline = True,
    train_only: TrainOnly = False,
    quick: Quick = False,
    resume: Resume = None,
    allow_changed: AllowChanged = False,
    as_json: Json = False,
    quiet: Quiet = False,
    address: Cluster = None,
    verbose: Verbose = False,
) -> None:
    """Train an experiment and report its speedup over a baseline."""
    given = with_address(overrides, address)
    with opened(file, given, as_json=as_json, quiet=quiet, prints=dry_run) as (experiment, terminal):
        if dry_run:
            extent = {"with_baseline": baseline, "train_only": train_only, "quick": quick}
            _print_plan(experiment, extent=extent, as_json=as_json, quiet=quiet)
            return
        with head_start(experiment, verbose=verbose):
            from pipeline.commands import run as runner

            runner.run(
                experiment,
                with_baseline=baseline,
                train_only=train_only,
                quick=quick,
                verbose=verbose,
                terminal=terminal,
                show=lambda result, _: print_json(result.model_dump_json(indent=2)) if as_json else None,
                resume=resume,
                allow_changed=allow_changed,
            )


def _print_plan(experiment: "ExperimentFile", *, extent: Mapping[str, bool], as_json: bool, quiet: bool) -> None:
    """Print the plan of a run; a download of its data shows its progress."""
    import rich.console

    from pipeline.record.console import progress_on
    from pipeline.record.screen import OptionalConsole, write

    begin_stage("importing torch")
    with undisturbed():
        from pipeline.commands import run as runner

    with progress_on(rich.console.Console(highlight=False, stderr=True, quiet=quiet)):
        plan = runner.dry_run(experiment, **extent, as_json=as_json)
    end_stage()
    if plan and as_json:
        typer.echo(plan)
    elif plan:
        write(OptionalConsole(highlight=False), plan)


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
    """Search hyperparameters: train the trials of the file's sweep section in parallel and find the best."""
    given = with_address(overrides, address)
    with opened(file, given, as_json=as_json, quiet=quiet, prints=dry_run) as (experiment, terminal):
        begin_stage("importing torch")
        with undisturbed():
            from pipeline.commands import sweep as runner

        if dry_run:
            plan = runner.describe(runner.make(experiment))
            end_stage()
            typer.echo(plan)
            return
        runner.sweep(
            experiment,
            resume=resume,
            verbose=verbose,
            terminal=terminal,
            show=lambda result, _: print_json(result.model_dump_json(indent=2)) if as_json else None,
        )

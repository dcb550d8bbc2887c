"""Commands that run and measure an experiment on this machine or on a Ray cluster."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    Scaling,
    TrainOnly,
    Verbose,
    counts_of,
    head_start,
    interruptible,
    opened,
    print_json,
    strategies_of,
    with_address,
)
from pipeline.cli.results import Directory, RunArgument, find_trained
from pipeline.errors import UsageError
from pipeline.system import stages
from pipeline.system.imports import undisturbed

if TYPE_CHECKING:
    from pipeline.config.load import ExperimentFile


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
        with head_start(experiment, verbose=verbose, tracked=True):
            from pipeline.commands import run as runner
            from pipeline.report.report import run_json

            runner.run(
                experiment,
                with_baseline=baseline,
                train_only=train_only,
                quick=quick,
                verbose=verbose,
                terminal=terminal,
                show=lambda report, folder: print_json(run_json(report, folder)) if as_json else None,
                resume=resume,
                allow_changed=allow_changed,
            )


def _print_plan(experiment: "ExperimentFile", *, extent: Mapping[str, bool], as_json: bool, quiet: bool) -> None:
    """Print the plan of a run; a download of its data shows its progress."""
    import rich.console

    from pipeline.recording.progress_bars import progress_on

    stages.begin("importing torch")
    with undisturbed():
        from pipeline.commands import run as runner

    with progress_on(rich.console.Console(highlight=False, stderr=True, quiet=quiet)):
        plan = runner.dry_run(experiment, **extent, as_json=as_json)
    stages.end()
    if plan:
        typer.echo(plan)


def measure(
    run: RunArgument,
    *,
    budget_s: Annotated[
        float | None,
        typer.Option(
            "--budget-s",
            min=1,
            metavar="SECONDS",
            help="Time budget for the measurement, in seconds. Default: the run's measure.budget_s.",
        ),
    ] = None,
    directory: Directory = Path("runs"),
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Measure the speedup of a finished run again, from its last checkpoint."""
    folder = find_trained(run, directory)
    with (
        opened(folder / "experiment.yaml", as_json=as_json, quiet=quiet) as (experiment, terminal),
        head_start(experiment, verbose=verbose, tracked=True),
    ):
        from pipeline.commands.measure import measure
        from pipeline.report.report import run_json

        measure(
            experiment,
            folder=folder,
            budget_s=budget_s,
            verbose=verbose,
            terminal=terminal,
            show=lambda report, folder: print_json(run_json(report, folder)) if as_json else None,
        )


def compare(
    file: FileArgument,
    overrides: Overrides = None,
    *,
    strategies: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Strategies to compare, e.g. single,ddp. Default: the strategies in the file's compare section.",
        ),
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            help="Numbers of workers, e.g. 1,2,4. Default: the numbers in the file's compare section.",
        ),
    ] = None,
    repeats: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of times to measure each configuration.")
    ] = 3,
    scaling: Annotated[
        Scaling,
        typer.Option(help="Keep the global batch size (strong) or the batch size per worker (weak), or measure both."),
    ] = Scaling.strong,
    profile: Annotated[
        bool, typer.Option("--profile", help="Record a torch.profiler trace of each configuration.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    address: Cluster = None,
    verbose: Verbose = False,
) -> None:
    """Compare the throughput of strategies and numbers of workers in short, alternating measurements."""
    with opened(file, with_address(overrides, address), as_json=as_json, quiet=quiet) as (experiment, terminal):
        from pipeline.commands.matrix import MatrixRequest

        wanted = MatrixRequest(
            strategies=strategies_of(strategies) if strategies is not None else (),
            workers=counts_of("--workers", workers) if workers is not None else (),
            scaling=scaling.value,
            repeats=repeats,
            profile=profile,
        )
        with head_start(experiment, verbose=verbose, tracked=True):
            from pipeline.commands.compare import compare
            from pipeline.report.report import comparison_json

            compare(
                experiment,
                wanted=wanted,
                verbose=verbose,
                terminal=terminal,
                show=lambda report, _: print_json(comparison_json(report)) if as_json else None,
            )


def tune_batch(
    file: FileArgument,
    overrides: Overrides = None,
    *,
    most: Annotated[
        int | None, typer.Option("--max", min=1, metavar="N", help="Largest batch size per device to try.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    address: Cluster = None,
    verbose: Verbose = False,
) -> None:
    """Find the smallest batch size per device at which throughput stops growing."""
    with (
        opened(file, with_address(overrides, address), as_json=as_json, quiet=quiet) as (experiment, terminal),
        head_start(experiment, verbose=verbose, tracked=False),
    ):
        from pipeline.commands import tune_batch as tuning

        report = tuning.tune_batch(experiment, most=most, verbose=verbose, terminal=terminal)
    if as_json:
        typer.echo(report.tuned.model_dump_json(indent=2))


def predict(
    file: FileArgument,
    overrides: Overrides = None,
    *,
    workers: Annotated[
        int, typer.Option(min=1, max=1024, metavar="N", help="Largest number of workers to estimate the speedup for.")
    ] = 64,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="BANDWIDTH,LATENCY",
            help="Network between workers, e.g. 25Gbit,20us. Default: measured on this machine.",
        ),
    ] = None,
    scaling: Annotated[
        Scaling,
        typer.Option(help="Keep the global batch size (strong) or the batch size per worker (weak), or predict both."),
    ] = Scaling.both,
    as_json: Json = False,
    quiet: Quiet = False,
    address: Cluster = None,
    verbose: Verbose = False,
) -> None:
    """Estimate the speedup with more workers than this machine has. To run a trained model, see export."""
    _refuse_run(file)
    with opened(file, with_address(overrides, address), as_json=as_json, quiet=quiet) as (experiment, terminal):
        from pipeline.report.link import parse

        given = parse(link) if link is not None else None
        with head_start(experiment, verbose=verbose, tracked=True):
            from pipeline.commands import predict as prediction

            prediction.predict(
                experiment,
                workers=workers,
                link=given,
                scaling=scaling.value,
                verbose=verbose,
                terminal=terminal,
                show=lambda forecast: print_json(forecast.model_dump_json(indent=2)) if as_json else None,
            )


def _refuse_run(file: str) -> None:
    """Check that the argument is not a run: in other tools, to predict is to compute a model's outputs.

    Raises:
        UsageError: it is a run; the message names the commands that use a trained model.
    """
    from pipeline.recording import runs

    if Path(file).is_file():
        return
    try:
        run = runs.find(file, Path("runs")).name
    except UsageError:
        return
    raise UsageError(
        f"{file} is a run, but pipeline predict needs an experiment file: it estimates a speedup. "
        f"To use the run's model: pipeline evaluate {run}, or pipeline export {run} --to FOLDER"
    )


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
    with (
        opened(file, given, as_json=as_json, quiet=quiet, prints=dry_run) as (experiment, terminal),
        interruptible(),
    ):
        stages.begin("importing torch")
        with undisturbed():
            from pipeline.commands.sweep import planning

        if dry_run:
            plan = planning.describe(planning.make(experiment))
            stages.end()
            typer.echo(plan)
            return
        from pipeline.commands.sweep.run_sweep import sweep as run_sweep

        run_sweep(
            experiment,
            resume=resume,
            verbose=verbose,
            terminal=terminal,
            show=lambda report: print_json(report.swept.model_dump_json(indent=2)) if as_json else None,
        )

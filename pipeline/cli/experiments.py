"""Commands that take an experiment: check it, run it, measure it."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli import completion
from pipeline.cli.arguments import (
    Cluster,
    FileArgument,
    Json,
    Overrides,
    Quiet,
    Resume,
    Scaling,
    Verbose,
    counts_of,
    head_start,
    problems_of,
    show,
    strategies_of,
    with_address,
)
from pipeline.errors import PipelineError
from pipeline.system.imports import undisturbed

if TYPE_CHECKING:
    from pipeline.config.load import ExperimentFile


def run(
    file: FileArgument,
    overrides: Overrides = None,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and start nothing.")] = False,
    baseline: Annotated[bool, typer.Option(help="Measure the baseline that the speedup is relative to.")] = True,
    resume: Resume = None,
    allow_changed: Annotated[
        bool, typer.Option("--allow-changed", help="Resume although the experiment has changed.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    address: Cluster = None,
    verbose: Verbose = False,
) -> None:
    """Run an experiment and report its speedup."""
    import rich.console

    from pipeline.config.load import load
    from pipeline.recording.progress_bars import progress_on
    from pipeline.recording.terminal import Terminal

    experiment = load(file, with_address(overrides, address))  # before torch is imported: a typo is answered at once
    if dry_run:
        with undisturbed():
            from pipeline.commands import run as runner

        with progress_on(rich.console.Console(highlight=False, stderr=True, quiet=quiet)):
            plan = runner.dry_run(experiment, with_baseline=baseline, as_json=as_json)
        typer.echo(plan)
        return
    with head_start(experiment, verbose=verbose, tracked=True):
        from pipeline.commands import run as runner
        from pipeline.report.report import run_json

        runner.run(
            experiment,
            with_baseline=baseline,
            verbose=verbose,
            terminal=Terminal.of(as_json=as_json, quiet=quiet),
            show=lambda report, folder: typer.echo(run_json(report, folder)) if as_json else None,
            resume=resume,
            allow_changed=allow_changed,
        )


def compare(
    file: FileArgument,
    overrides: Overrides = None,
    *,
    strategies: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Strategies; default: those of the file's compare.",
            autocompletion=completion.strategies,
        ),
    ] = None,
    workers: Annotated[
        str | None, typer.Option(metavar="N,...", help="Numbers of workers; default: those of the file's compare.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each cell, in turn with the others.")] = 3,
    scaling: Annotated[
        Scaling, typer.Option(help="strong: the same global batch; weak: the same batch for each worker.")
    ] = Scaling.strong,
    profile: Annotated[bool, typer.Option("--profile", help="Record a torch.profiler trace of each cell.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    address: Cluster = None,
    verbose: Verbose = False,
) -> None:
    """Measure strategies and numbers of workers side by side, in short trials taken in turn."""
    from pipeline.commands.matrix import MatrixRequest
    from pipeline.config.load import load

    experiment = load(file, with_address(overrides, address))
    wanted = MatrixRequest(
        strategies=strategies_of(strategies) if strategies is not None else (),
        workers=counts_of("--workers", workers) if workers is not None else (),
        scaling=scaling.value,
        repeats=repeats,
        profile=profile,
    )
    with head_start(experiment, verbose=verbose, tracked=True):
        from pipeline.commands.compare import compare
        from pipeline.recording.terminal import Terminal
        from pipeline.report.report import comparison_json

        compare(
            experiment,
            wanted=wanted,
            verbose=verbose,
            terminal=Terminal.of(as_json=as_json, quiet=quiet),
            show=lambda report, _: typer.echo(comparison_json(report)) if as_json else None,
        )


def tune_batch(
    file: FileArgument,
    overrides: Overrides = None,
    *,
    most: Annotated[int | None, typer.Option("--max", min=1, help="Largest batch of one device to try.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    address: Cluster = None,
    verbose: Verbose = False,
) -> None:
    """Find the batch size of a device: the smallest at which throughput stops growing."""
    from pipeline.config.load import load

    experiment = load(file, with_address(overrides, address))
    with head_start(experiment, verbose=verbose, tracked=False):
        from pipeline.commands import tune_batch as tuning
        from pipeline.recording.terminal import Terminal

        terminal = Terminal.of(as_json=as_json, quiet=quiet)
        report = tuning.tune_batch(experiment, most=most, verbose=verbose, terminal=terminal)
    if as_json:
        typer.echo(report.tuned.model_dump_json(indent=2))


def predict(
    file: FileArgument,
    overrides: Overrides = None,
    *,
    workers: Annotated[int, typer.Option(min=1, max=1024, help="The most workers to predict.")] = 64,
    link: Annotated[
        str | None,
        typer.Option(metavar="BANDWIDTH,LATENCY", help="Between workers, e.g. 25Gbit,20us; default: measured here."),
    ] = None,
    scaling: Annotated[
        Scaling, typer.Option(help="strong: the same global batch; weak: the same batch for each worker.")
    ] = Scaling.both,
    as_json: Json = False,
    quiet: Quiet = False,
    address: Cluster = None,
    verbose: Verbose = False,
) -> None:
    """Predict speedup and efficiency on more workers than there are, from a few seconds of measuring."""
    from pipeline.config.load import load
    from pipeline.recording.terminal import Terminal
    from pipeline.report.link import parse

    experiment = load(file, with_address(overrides, address))
    given = parse(link) if link is not None else None
    with head_start(experiment, verbose=verbose, tracked=False):
        from pipeline.commands import predict as prediction

        prediction.predict(
            experiment,
            workers=workers,
            link=given,
            scaling=scaling.value,
            verbose=verbose,
            terminal=Terminal.of(as_json=as_json, quiet=quiet),
            show=lambda forecast: typer.echo(forecast.model_dump_json(indent=2)) if as_json else None,
        )


def check(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...", help="Experiments to check.", show_default=False, autocompletion=completion.files
        ),
    ],
    *,
    data: Annotated[bool, typer.Option(help="Load the data; without, on a machine that doesn't have it.")] = True,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print problems only.")] = False,
) -> None:
    """Check experiments and everything they name, load their data, and start nothing."""
    import rich.console

    from pipeline.config.load import load
    from pipeline.recording.progress_bars import progress_on

    with undisturbed():
        from pipeline.driver import preflight

    errors: dict[str, PipelineError] = {}
    for file in files:
        try:
            experiment = load(file)
            with progress_on(rich.console.Console(highlight=False, stderr=True, quiet=quiet)):
                allowed = preflight.check(experiment, with_data=data)
        except PipelineError as error:
            show(error)
            errors[file] = error
        else:
            if not quiet:
                typer.echo(f"{file}: ok{_sweep_in(experiment, allowed)}", err=as_json)
    if as_json:
        typer.echo(json.dumps([{"file": file, "problems": problems_of(errors.get(file))} for file in files], indent=2))
    if errors:
        raise typer.Exit(next(iter(errors.values())).exit_code)


def _sweep_in(file: "ExperimentFile", allowed: tuple[str, ...]) -> str:
    """What the file's sweep would do, as far as it is known without asking a cluster."""
    if file.experiment.sweep is None:
        return ""
    from pipeline.commands.sweep.planning import in_a_line

    return f"; {in_a_line(file, allowed=allowed)}"

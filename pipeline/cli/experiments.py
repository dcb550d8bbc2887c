"""Commands that run and measure an experiment on this machine or on a Ray cluster."""

from typing import Annotated

import typer

from pipeline.commands.options import (
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
    counts_of,
    head_start,
    opened,
    print_json,
    say,
    strategies_of,
    with_address,
)
from pipeline.system import begin_stage, end_stage, undisturbed


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
            from pipeline.record.console import progress_on
            from pipeline.record.screen import OptionalConsole

            begin_stage("importing torch")
            with undisturbed():
                from pipeline.commands import run as runner

            with progress_on(OptionalConsole(highlight=False, stderr=True, quiet=quiet)):  # of a download of its data
                plan = runner.dry_run(
                    experiment, with_baseline=baseline, train_only=train_only, quick=quick, as_json=as_json
                )
            end_stage()
            if plan:
                (print_json if as_json else say)(plan)
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


def benchmark(
    file: FileArgument,
    overrides: Overrides = None,
    *,
    strategies: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Strategies to measure, e.g. single,ddp. Default: those of the file and of its baseline.",
        ),
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            help="Numbers of workers, e.g. 1,2,4. Default: those of the file and of its baseline.",
        ),
    ] = None,
    repeats: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of times to measure each configuration.")
    ] = 3,
    batch_sizes: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            help="Also measure the file's configuration with these batch sizes per device.",
        ),
    ] = None,
    vary: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=VALUE,...",
            help='Measure the values of a key, e.g. loader.num_workers=0,2; of several keys in quotes: "A=1,2 B=3,4".',
        ),
    ] = None,
    predict: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            help="Add predicted rows for these numbers of workers of ddp, e.g. 8,64, more than this machine has.",
        ),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(
            metavar="BANDWIDTH,LATENCY",
            help="Network between predicted workers, e.g. 25Gbit,20us. Default: measured between workers here.",
        ),
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Record a torch.profiler trace of each configuration.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    address: Cluster = None,
    verbose: Verbose = False,
) -> None:
    """Measure the speed of strategies, workers, batch sizes and other keys."""
    from pipeline.experiment.load import parse_vary

    varied, shared = parse_vary(vary) if vary is not None else ([], [])
    overrides = [*with_address(overrides, address), *shared]
    with opened(file, overrides, as_json=as_json, quiet=quiet) as (experiment, terminal):
        from pipeline.results.prediction import parse_link

        sizes = counts_of("--batch-sizes", batch_sizes, what="batch size") if batch_sizes is not None else ()
        chosen = strategies_of(strategies) if strategies is not None else ()
        counts = counts_of("--workers", workers) if workers is not None else ()
        predicted = counts_of("--predict", predict) if predict is not None else ()
        link = parse_link(network) if network is not None else None
        with head_start(experiment, verbose=verbose):
            from pipeline.commands.benchmark import Request, benchmark

            benchmark(
                experiment,
                request=Request(
                    strategies=chosen,
                    workers=counts,
                    batch_sizes=sizes,
                    vary=tuple(map(tuple, varied)),
                    repeats=repeats,
                    profile=profile,
                    predict=predicted,
                    network=link,
                ),
                verbose=verbose,
                terminal=terminal,
                show=lambda result, _: print_json(result.model_dump_json(indent=2)) if as_json else None,
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
    with opened(file, given, as_json=as_json, quiet=quiet, prints=dry_run) as (experiment, terminal):
        begin_stage("importing torch")
        with undisturbed():
            from pipeline.commands import sweep as runner

        if dry_run:
            plan = runner.describe(runner.make(experiment))
            end_stage()
            say(plan)
            return
        runner.sweep(
            experiment,
            resume=resume,
            verbose=verbose,
            terminal=terminal,
            show=lambda result, _: print_json(result.model_dump_json(indent=2)) if as_json else None,
        )

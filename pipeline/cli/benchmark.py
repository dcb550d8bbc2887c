"""The command that measures the speed of an experiment's configurations."""

from typing import Annotated

import typer

from pipeline.commands.options import (
    Cluster,
    FileArgument,
    Json,
    Overrides,
    Quiet,
    Verbose,
    counts_of,
    head_start,
    opened,
    print_json,
    strategies_of,
    with_address,
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
    """Measure the speed of strategies, workers and batch sizes."""
    with opened(file, with_address(overrides, address), as_json=as_json, quiet=quiet) as (experiment, terminal):
        from pipeline.commands.benchmark.matrix import MatrixRequest
        from pipeline.commands.benchmark.predicted_rows import parse_request

        counts, link = parse_request(counts_of("--predict", predict) if predict is not None else (), network)
        wanted = MatrixRequest(
            strategies=strategies_of(strategies) if strategies is not None else (),
            workers=counts_of("--workers", workers) if workers is not None else (),
            repeats=repeats,
            profile=profile,
            batch_sizes=counts_of("--batch-sizes", batch_sizes, what="batch size") if batch_sizes is not None else (),
            predict=counts,
            network=link,
        )
        with head_start(experiment, verbose=verbose):
            from pipeline.commands.benchmark.measure import benchmark
            from pipeline.report.report import comparison_json

            benchmark(
                experiment,
                wanted=wanted,
                verbose=verbose,
                terminal=terminal,
                show=lambda report, _: print_json(comparison_json(report)) if as_json else None,
            )

"""The command that measures the speed of an experiment's configurations, or of a completed run again."""

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Literal

import typer

from pipeline.cli.arguments import (
    Cluster,
    Json,
    Overrides,
    Quiet,
    Scaling,
    Verbose,
    counts_of,
    head_start,
    opened,
    print_json,
    strategies_of,
    with_address,
)
from pipeline.cli.results import Directory, find_trained
from pipeline.errors import UsageError

_OF_A_RUN = ("time_budget", "directory")
"""Parameters that are only for a completed run."""
_OF_A_FILE = (
    *("overrides", "strategies", "workers", "scaling", "repeats", "profile", "address"),
    *("batch_sizes", "predict", "network"),
)
"""Parameters that are only for an experiment file."""


def benchmark(
    ctx: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE|RUN",
            help="Experiment file (YAML), or a completed run to measure again: its id, its folder, or latest.",
            show_default=False,
        ),
    ],
    overrides: Overrides = None,
    *,
    strategies: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Strategies to measure, e.g. single,ddp. Default: the strategies in the file's benchmark section.",
        ),
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            help="Numbers of workers, e.g. 1,2,4. Default: the numbers in the file's benchmark section.",
        ),
    ] = None,
    scaling: Annotated[
        Scaling,
        typer.Option(help="Keep the global batch size (strong) or the batch size per worker (weak), or measure both."),
    ] = Scaling.strong,
    repeats: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of times to measure each configuration.")
    ] = 3,
    batch_sizes: Annotated[
        str | None,
        typer.Option(
            metavar="N,...|auto",
            help="Also measure the file's configuration with these batch sizes per device. auto doubles the file's "
            "batch size until memory runs out or throughput grows by less than 5%.",
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
    time_budget: Annotated[
        float | None,
        typer.Option(
            min=1,
            metavar="SECONDS",
            help="Time budget to measure a RUN again, in seconds. Default: the run's benchmark.time_budget_s.",
        ),
    ] = None,
    directory: Directory = Path("runs"),
    as_json: Json = False,
    quiet: Quiet = False,
    address: Cluster = None,
    verbose: Verbose = False,
) -> None:
    """Measure the speed of strategies, workers and batch sizes, or the speedup of a completed run again."""
    if not is_file(target):
        _check_ungiven(ctx, _OF_A_FILE, reason=f"{target} is not an experiment file, and a run is measured as it was")
        _measure_again(
            target, directory=directory, time_budget=time_budget, as_json=as_json, quiet=quiet, verbose=verbose
        )
        return
    _check_ungiven(ctx, _OF_A_RUN, reason=f"{target} is an experiment file, not a run")
    with opened(target, with_address(overrides, address), as_json=as_json, quiet=quiet) as (experiment, terminal):
        from pipeline.commands.benchmark.matrix import MatrixRequest
        from pipeline.commands.benchmark.predicted_rows import parse_request

        counts, link = parse_request(counts_of("--predict", predict) if predict is not None else (), network)
        wanted = MatrixRequest(
            strategies=strategies_of(strategies) if strategies is not None else (),
            workers=counts_of("--workers", workers) if workers is not None else (),
            scaling=scaling.value,
            repeats=repeats,
            profile=profile,
            batch_sizes=_parse_sizes(batch_sizes) if batch_sizes is not None else (),
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


def _measure_again(
    run: str, *, directory: Path, time_budget: float | None, as_json: bool, quiet: bool, verbose: bool
) -> None:
    folder = find_trained(run, directory)
    with (
        opened(folder / "experiment.yaml", as_json=as_json, quiet=quiet) as (experiment, terminal),
        head_start(experiment, verbose=verbose),
    ):
        from pipeline.commands.benchmark.again import measure_again
        from pipeline.report.report import run_json

        measure_again(
            experiment,
            folder=folder,
            budget_s=time_budget,
            verbose=verbose,
            terminal=terminal,
            show=lambda report, folder: print_json(run_json(report, folder)) if as_json else None,
        )


def _parse_sizes(text: str) -> "tuple[int, ...] | Literal['auto']":
    return "auto" if text == "auto" else counts_of("--batch-sizes", text, what="batch size")


def is_file(target: str) -> bool:
    """Return True if an argument is meant as an experiment file, which may be missing."""
    path = Path(target)
    return path.is_file() or path.suffix in (".yaml", ".yml")


def _check_ungiven(ctx: typer.Context, names: Collection[str], *, reason: str) -> None:
    """Check that parameters are not on the command line.

    Raises:
        UsageError: one is.
    """
    for parameter in ctx.command.params:
        source = ctx.get_parameter_source(parameter.name or "")
        if parameter.name in names and source is not None and source.name == "COMMANDLINE":
            word = parameter.opts[0] if parameter.param_type_name == "option" else "KEY=VALUE"
            raise UsageError(f"{word}: {reason}. Remove it.")

"""``pipeline compare``: experiment files are trained in pairs, recorded runs are compared as they are."""

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.commands.options import (
    Cluster,
    Directory,
    DryRun,
    Json,
    Quiet,
    Verbose,
    consoles,
    is_file,
    print_json,
    say,
    summary_of,
    with_address,
)
from pipeline.errors import UsageError
from pipeline.system import begin_stage, end_stage, undisturbed

if TYPE_CHECKING:
    from pipeline.record.runs import RunSummary
    from pipeline.results.record import Result

_LEAST, _PAIRS = 2, 5
_RUNS = Path("runs")


class BetterDirection(StrEnum):
    """Direction in which a metric improves."""

    min = "min"
    max = "max"


def compare(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...|RUN...",
            help="Experiment files to train in pairs, with overrides for all; or recorded runs with the same seeds, a "
            "sweep.",
            show_default=False,
        ),
    ],
    *,
    seeds: Annotated[
        int | None,
        typer.Option("--seeds", metavar="N", help="Pairs of trainings, one seed each.", show_default="5"),
    ] = None,
    vary: Annotated[
        str | None,
        typer.Option(
            "--vary",
            metavar="KEY=A,B",
            help="Compare values of one file's keys, e.g. optimizer.lr=0.1,0.05.",
        ),
    ] = None,
    concurrent: Annotated[
        int, typer.Option("--concurrent", metavar="N", min=1, help="Trainings at the same time.")
    ] = 1,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            metavar="VALUE|auto",
            help="Compare the time until the validation metric reaches this value; auto: one that all reach. Trains "
            "one at a time.",
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric",
            metavar="NAME",
            help="Metric to compare by. Default: checkpoint.best, or else a validation metric.",
        ),
    ] = None,
    mode: Annotated[
        BetterDirection | None,
        typer.Option("--mode", metavar="min|max", help="Direction in which the metric improves, if it is not known."),
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(
            "--margin",
            metavar="SIZE",
            min=0.0,
            help="Difference up to which variants count as equal; of a rate, in points.",
        ),
    ] = None,
    dry_run: DryRun = False,
    directory: Directory = _RUNS,
    as_json: Json = False,
    quiet: Quiet = False,
    address: Cluster = None,
    verbose: Verbose = False,
) -> None:
    """Compare experiments: which is better beyond the luck of their seeds, and what differs."""
    asked = {"metric": metric, "mode": mode and mode.value, "margin": margin}
    asked |= {"target": _parse_target(target), "is_timed": target is not None}
    files = [word for word in words if is_file(word)]
    if not files:
        for_files = {"--seeds": seeds, "--vary": vary, "--target": target, "--dry-run": dry_run or None}
        wrong = [option for option, value in for_files.items() if value is not None]
        if wrong:
            raise UsageError(f"{wrong[0]} trains experiment files. No file is named, only: {' '.join(words)}")
        from pipeline.record.screen import Terminal
        from pipeline.results.terminal import print_result

        result = _compare_runs(words, asked, directory=directory)
        if as_json:
            print_json(result.model_dump_json(indent=1))
        else:
            print_result(result, terminal=Terminal.of(quiet=quiet), is_verbose=verbose)
        return
    overrides = [word for word in words if not is_file(word)]
    if other := next((word for word in overrides if "=" not in word), ""):
        raise UsageError(f"{other} is neither an experiment file nor an override such as train.epochs=2")
    pairs = _PAIRS if seeds is None else seeds
    if pairs < _LEAST:
        raise UsageError(
            f"--seeds {pairs}: a single pair has no confidence interval. Use at least {_LEAST}, e.g. --seeds 5."
        )
    if dry_run and as_json:
        raise UsageError("--dry-run prints the plan as text. Remove --json.")
    if directory != _RUNS:
        raise UsageError("--directory is for recorded runs. For files, set tracking.directory=FOLDER.")
    if target is not None and concurrent > 1:
        raise UsageError(f"--target compares times, so trainings run one at a time. Remove --concurrent {concurrent}.")
    with consoles(as_json=as_json, quiet=quiet, prints=dry_run) as terminal:
        begin_stage("reading the experiments")
        from pipeline.experiment.load import read_variants

        variants = read_variants(files, with_address(overrides, address), vary=vary)
        begin_stage("importing torch")
        with undisturbed():
            from pipeline.commands.compare import compare_files, plan_comparison
            from pipeline.commands.compared_runs import Question

        comparison = plan_comparison(variants, Question.model_validate(asked), pairs=pairs, concurrent=concurrent)
        end_stage()
        if dry_run:
            say(comparison.describe())
            return
        compare_files(
            comparison,
            terminal=terminal,
            verbose=verbose,
            show=lambda result, _: print_json(result.model_dump_json(indent=1)) if as_json else None,
        )


def _parse_target(text: str | None) -> float | None:
    """Parse ``--target``."""
    if text is None or text == "auto":
        return None
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise UsageError(f"--target {text}: write a value of the metric, e.g. 0.97, or auto")
    return found


def _compare_runs(words: Sequence[str], asked: Mapping[str, object], *, directory: Path) -> "Result":
    """Compare recorded runs."""
    from pipeline.commands.compared_runs import Question, compare_runs

    found = [one for word in words for one in _trials(summary_of(word, directory))]
    if len(found) < 2:
        raise UsageError(f"name at least two runs, or a sweep, e.g. pipeline compare {words[0]} RUN")
    if repeated := next((one.run for one in found if [other.run for other in found].count(one.run) > 1), ""):
        raise UsageError(f"{repeated} is named twice")
    return compare_runs(found, Question.model_validate(asked))


def _trials(run: "RunSummary") -> "list[RunSummary]":
    """Return the trials of a sweep that have started; of another run, itself."""
    from pipeline.protocol.trial import PARENTS
    from pipeline.record.folder import trials_of
    from pipeline.record.runs import summarize_run

    if run.command not in PARENTS:
        return [run]
    return [trial for folder in trials_of(run.folder) if (trial := summarize_run(folder)) is not None]

"""``pipeline compare``: experiment files are trained in pairs, recorded runs are compared as they are."""

import json
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
    Resume,
    Verbose,
    consoles,
    is_file,
    print_json,
    summary_of,
    with_address,
)
from pipeline.errors import UsageError
from pipeline.system import stages
from pipeline.system.imports import undisturbed

if TYPE_CHECKING:
    from pipeline.record.run_summary import RunSummary

_LEAST, _PAIRS, _AT_MOST = 2, 5, 20
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
            "sweep, a study.",
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
    until_clear: Annotated[bool, typer.Option("--until-clear", help="Add pairs until the answer is clear.")] = False,
    at_most: Annotated[
        int | None,
        typer.Option("--at-most", metavar="N", help="Most pairs of --until-clear.", show_default="20"),
    ] = None,
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
        typer.Option("--mode", help="Direction in which the metric improves, if it is not known."),
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
    resume: Resume = None,
    directory: Directory = _RUNS,
    as_json: Json = False,
    quiet: Quiet = False,
    address: Cluster = None,
    verbose: Verbose = False,
) -> None:
    """Compare experiments: which is better beyond the luck of their seeds, and what differs."""
    if at_most is not None and not until_clear:
        raise UsageError("--at-most limits --until-clear. Use both, or --seeds.")
    asked = {"metric": metric, "mode": mode and mode.value, "margin": margin, "target": _parse_target(target)}
    files = [word for word in words if is_file(word)]
    if not files:
        for_files = {"--seeds": seeds, "--vary": vary, "--target": target, "--resume": resume}
        wrong = [option for option, value in for_files.items() if value is not None]
        wrong += [option for option, value in {"--until-clear": until_clear, "--dry-run": dry_run}.items() if value]
        if wrong:
            raise UsageError(f"{wrong[0]} trains experiment files. No file is named, only: {' '.join(words)}")
        _compare_runs(words, asked, directory=directory, as_json=as_json)
        return
    overrides = [word for word in words if not is_file(word)]
    if other := next((word for word in overrides if "=" not in word), ""):
        raise UsageError(f"{other} is neither an experiment file nor an override such as train.epochs=2")
    first = _PAIRS if seeds is None else seeds
    if first < _LEAST:
        raise UsageError(
            f"--seeds {first}: a single pair has no confidence interval. Use at least {_LEAST}, e.g. --seeds 5."
        )
    most = max(_AT_MOST, first) if at_most is None else at_most
    if until_clear and most < first:
        raise UsageError(f"--at-most {most}: less than --seeds {first}, with which the study starts")
    if dry_run and as_json:
        raise UsageError("--dry-run prints the plan as text. Remove --json.")
    if directory != _RUNS:
        raise UsageError("--directory is for recorded runs. For files, set tracking.directory=FOLDER.")
    with consoles(as_json=as_json, quiet=quiet, prints=dry_run) as terminal:
        stages.begin("reading the experiments")
        from pipeline.experiment.variant_files import read_variants

        variants = read_variants(files, with_address(overrides, address), vary=vary)
        stages.begin("importing torch")
        with undisturbed():
            from pipeline.commands.compare import study_plan
            from pipeline.commands.compare.compared_runs import Question
        from pipeline.report.numbers.looks import plan_looks

        looks = plan_looks(first, at_most=most) if until_clear else (first,)
        plan = study_plan.make_study(variants, Question.model_validate(asked), pairs=first, is_timed=target is not None)
        from pipeline.commands.compare.study import open_record, study

        asked_looks = None if resume is not None and seeds is None and not until_clear else looks
        if dry_run:
            _, record = open_record(plan, asked_looks, resume=resume)
            stages.end()
            typer.echo(study_plan.describe_study(plan, looks=record.looks[-1].pairs))
            return
        study(
            plan,
            asked_looks,
            resume=resume,
            verbose=verbose,
            terminal=terminal,
            show=lambda compared: print_json(json.dumps(compared.to_mapping(), indent=2)) if as_json else None,
        )


def _parse_target(text: str | None) -> float | None:
    """Parse ``--target``.

    Raises:
        UsageError: it is neither a number nor auto.
    """
    if text is None or text == "auto":
        return None
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise UsageError(f"--target {text}: write a value of the metric, e.g. 0.97, or auto")
    return found


def _compare_runs(words: Sequence[str], asked: Mapping[str, object], *, directory: Path, as_json: bool) -> None:
    """Compare recorded runs, or show the answer of a study.

    Raises:
        UsageError: the runs can't be compared.
    """
    import rich.console

    from pipeline.commands.compare.compared_runs import Question, compare_runs, show_compared

    named = [summary_of(word, directory) for word in words]
    console = rich.console.Console(highlight=False)
    if len(named) == 1 and named[0].command == "study":
        from pipeline.commands.compare.study_answer import compare_study
        from pipeline.commands.ending import print_result

        changes = {name: value for name, value in asked.items() if value is not None}
        compared = compare_study(named[0].folder, changes=changes)
        if as_json:
            print_json(json.dumps(compared.to_mapping(), indent=2))
        else:
            print_result(compared, named[0].folder, stdout=console)
        return
    found = [one for run in named for one in _trials(run)]
    if len(found) < 2:
        raise UsageError(f"name at least two runs, or a sweep, e.g. pipeline compare {words[0]} RUN")
    if repeated := next((one.run for one in found if [other.run for other in found].count(one.run) > 1), ""):
        raise UsageError(f"{repeated} is named twice")
    runs = compare_runs(found, Question.model_validate(asked))
    if as_json:
        typer.echo(runs.to_json())
    else:
        show_compared(runs, console=console)


def _trials(run: "RunSummary") -> "list[RunSummary]":
    """Return the trials of a sweep or a study that have started; of another run, itself."""
    from pipeline.protocol.labels import PARENTS
    from pipeline.record.folder import trials_of
    from pipeline.record.run_summary import summarized

    if run.command not in PARENTS:
        return [run]
    return [trial for folder in trials_of(run.folder) if (trial := summarized(folder)) is not None]

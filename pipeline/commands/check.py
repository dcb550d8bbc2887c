"""``pipeline check``: experiments are checked one after the other, by two real steps."""

import faulthandler
import io
import json
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from pipeline.commands.options import Json, print_json, say, show
from pipeline.drive.execute import explain_problems
from pipeline.errors import ExperimentError, PipelineError, Problem, TrainingError, UsageError
from pipeline.experiment.load import ExperimentFile, load
from pipeline.record.console import progress_on, stages_on
from pipeline.record.screen import OptionalConsole
from pipeline.system import begin_stage, end_stage, undisturbed


class CheckResult(NamedTuple):
    """Problems and notes of a check."""

    error: PipelineError | None = None
    skipped: str = ""
    """Why no batch was tried, in a sentence; empty if one was."""


def check(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE... [KEY=VALUE]...", help="Experiment files; values for all.", show_default=False),
    ],
    *,
    data: Annotated[
        bool,
        typer.Option(help="Also load the data and try a batch. Use --no-data on a machine without the data."),
    ] = True,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only problems.")] = False,
) -> None:
    """Check experiment files without training: each component, the data, and one batch."""
    overrides = [word for word in files if "=" in word and not Path(word).exists()]
    files = [word for word in files if word not in overrides]
    if not files:
        raise UsageError(f"name an experiment file, too: pipeline check FILE {overrides[0]}")
    errors: dict[str, PipelineError] = {}
    console = OptionalConsole(highlight=False, stderr=True, quiet=quiet)
    with stages_on(OptionalConsole(quiet=True) if as_json else console):
        for file in files:
            with progress_on(console):
                found = check_file(file, overrides, with_data=data)
            end_stage()
            if found.error is not None:
                show(found.error)
                errors[file] = found.error
            elif not quiet:
                skipped = f"\n  No batch was tried. {found.skipped}" if found.skipped else ""
                say(f"{file}: ok{skipped}", err=as_json)
    if as_json:
        listed = [{"file": file, "problems": list_problems(errors.get(file))} for file in files]
        print_json(json.dumps(listed, indent=2))
    if errors:
        raise typer.Exit(next(iter(errors.values())).exit_code)


def list_problems(error: PipelineError | None) -> list[dict[str, str]]:
    """Return the problems of a file for JSON, each with key, message and place."""
    problems = error.problems if isinstance(error, ExperimentError) else [Problem("", str(error))] if error else []
    return [problem._asdict() for problem in problems]


def check_file(name: str, overrides: Sequence[str], *, with_data: bool) -> CheckResult:
    """Check a file; what its code prints is dropped. With ``with_data`` load its data and weights, and try a batch."""
    with suppress(OSError, ValueError):  # where standard error is no file
        faulthandler.enable()  # a crash in native code ends the command, with its stack
    begin_stage(f"checking {name}")
    try:
        file = load(name, overrides)
        with undisturbed():
            import pipeline.worker  # noqa: F401 - and torch with it
        with redirect_stdout(io.StringIO()):
            return _check(file, with_data=with_data)
    except TrainingError as error:
        return CheckResult(TrainingError(f"{name}: {error}", error.details))
    except PipelineError as error:
        return CheckResult(error)


def _check(file: ExperimentFile, *, with_data: bool) -> CheckResult:
    from pipeline.drive import preflight

    try:
        allowed = preflight.check(file, with_weights=with_data)
    except ExperimentError:
        if with_data:  # whose problems are reported together with the others
            preflight.check(file, with_data=True)
        raise
    skipped = preflight.find_reason_to_skip(file.experiment, allowed=allowed) if with_data else ""
    if skipped:
        with explain_problems(file):
            preflight.data_sizes(file.experiment, allowed=allowed)
    elif with_data:
        preflight.try_steps(file, allowed=allowed, receive=lambda _: None)
    return CheckResult(skipped=skipped)

"""``pipeline check``: experiments are checked one after the other, by two real steps."""

import faulthandler
import io
import json
import logging
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Annotated

import typer

from pipeline.commands.options import Json, print_json, say, show
from pipeline.drive.execute import explain_problems
from pipeline.errors import ExperimentError, PipelineError, Problem, TrainingError, UsageError
from pipeline.experiment.load import ExperimentFile, load
from pipeline.record.console import progress_on, stages_on
from pipeline.record.screen import OptionalConsole
from pipeline.system import begin_stage, end_stage, undisturbed


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
    """Check experiment files without training: each component, the data, and a few samples."""
    overrides = [word for word in files if "=" in word and not Path(word).exists()]
    files = [word for word in files if word not in overrides]
    if not files:
        raise UsageError(f"name an experiment file, too: pipeline check FILE {overrides[0]}")
    errors: dict[str, PipelineError] = {}
    console = OptionalConsole(highlight=False, stderr=True, quiet=quiet)
    with stages_on(OptionalConsole(quiet=True) if as_json else console):
        for file in files:
            try:
                with progress_on(console):
                    skipped = check_file(file, overrides, with_data=data)
            except PipelineError as error:
                show(error)
                errors[file] = error
                continue
            end_stage()
            if not quiet:
                say(f"{file}: ok" + (f"\n  No batch was tried. {skipped}" if skipped else ""), err=as_json)
    if as_json:
        listed = [{"file": file, "problems": list_problems(errors.get(file))} for file in files]
        print_json(json.dumps(listed, indent=2))
    if errors:
        raise typer.Exit(next(iter(errors.values())).exit_code)


def list_problems(error: PipelineError | None) -> list[dict[str, str]]:
    """Return the problems of a file for JSON, each with key, message and place."""
    problems = error.problems if isinstance(error, ExperimentError) else [Problem("", str(error))] if error else []
    return [problem._asdict() for problem in problems]


def check_file(name: str, overrides: Sequence[str], *, with_data: bool) -> str:
    """Check a file, with data, weights and a batch if asked to; return why no batch was tried. It prints nothing."""
    with suppress(OSError, ValueError):  # where standard error is no file
        faulthandler.enable()  # a crash in native code ends the command, with its stack
    logging.getLogger("pipeline").addHandler(logging.NullHandler())  # the user gets a part of a traceback, or one line
    begin_stage(f"checking {name}")
    try:
        file = load(name, overrides)
        with undisturbed():
            import pipeline.worker  # noqa: F401 - and torch with it
        with redirect_stdout(io.StringIO()):
            return _check(file, with_data=with_data)
    except TrainingError as error:
        raise TrainingError(f"{name}: {error}", error.details) from error


def _check(file: ExperimentFile, *, with_data: bool) -> str:
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
    return skipped

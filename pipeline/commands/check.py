"""``pipeline check``: experiments are checked one after the other, by two real steps."""

import faulthandler
import gc
import importlib
import io
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from pipeline.commands.options import Json, print_json, say, show
from pipeline.drive.execute import explain_problems
from pipeline.errors import ExperimentError, PipelineError, Problem, TrainingError, UsageError
from pipeline.experiment.load import ExperimentFile, load
from pipeline.launch.torchrun import find_libraries
from pipeline.record.console import progress_on, stages_on
from pipeline.record.screen import OptionalConsole
from pipeline.system import begin_stage, end_stage, undisturbed

_PRELOADED = ("pipeline.worker", "torch._dynamo")


class CheckResult(NamedTuple):
    """Problems and notes of a check."""

    error: PipelineError | None = None
    sweep: str = ""
    """The file's sweep in a line; empty without one."""
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
        for file, check_this in iter_checks(files, overrides, with_data=data):
            with progress_on(console):
                found = check_this()
            end_stage()
            if found.error is not None:
                show(found.error)
                errors[file] = found.error
            elif not quiet:
                skipped = f"\n  No batch was tried. {found.skipped}" if found.skipped else ""
                say(f"{file}: ok{f'; {found.sweep}' if found.sweep else ''}{skipped}", err=as_json)
    if as_json:
        listed = [{"file": file, "problems": list_problems(errors.get(file))} for file in files]
        print_json(json.dumps(listed, indent=2))
    if errors:
        raise typer.Exit(next(iter(errors.values())).exit_code)


def list_problems(error: PipelineError | None) -> list[dict[str, str]]:
    """Return the problems of a file for JSON, each with key, message and place."""
    problems = error.problems if isinstance(error, ExperimentError) else [Problem("", str(error))] if error else []
    return [problem._asdict() for problem in problems]


def check_file(file: ExperimentFile, *, with_data: bool) -> CheckResult:
    """Check an experiment; what it prints is dropped.

    Args:
        file: the experiment.
        with_data: True to load its data and weights, and to try a batch.
    """
    with suppress(OSError, ValueError):  # where standard error is no file
        faulthandler.enable()  # a crash in native code ends the command, with its stack
    try:
        with redirect_stdout(io.StringIO()):
            begin_stage(f"checking {file.path}")
            return _check(file, with_data=with_data)
    except TrainingError as error:
        return CheckResult(TrainingError(f"{file.path}: {error}", error.details))
    except PipelineError as error:
        return CheckResult(error)


def iter_checks(
    names: Sequence[str], overrides: Sequence[str] = (), *, with_data: bool
) -> Iterator[tuple[str, Callable[[], CheckResult]]]:
    """Yield files with a function that checks them, see `check_file`; torch is imported if one can be read."""
    loaded: dict[str, ExperimentFile | PipelineError] = {}
    for name in names:
        try:
            loaded[name] = load(name, overrides)
        except PipelineError as error:
            loaded[name] = error
    _preload([file for file in loaded.values() if isinstance(file, ExperimentFile)])
    for name, file in loaded.items():
        if isinstance(file, ExperimentFile):
            yield name, partial(check_file, file, with_data=with_data)
        else:
            yield name, partial(CheckResult, file)


def _preload(files: Sequence[ExperimentFile]) -> None:
    """Import what the checks of files need."""
    if not files:
        return
    begin_stage("importing torch")
    with undisturbed():
        for module in (*_PRELOADED, *dict.fromkeys(name for file in files for name in find_libraries(file.experiment))):
            with suppress(Exception):  # the check reports it
                importlib.import_module(module)
    gc.freeze()  # a collection would look through all of it
    end_stage()


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
    if file.experiment.sweep is None:
        return CheckResult(skipped=skipped)
    from pipeline.commands.sweep_trial import describe_in_a_line

    return CheckResult(sweep=describe_in_a_line(file, file.experiment.sweep, allowed=allowed), skipped=skipped)

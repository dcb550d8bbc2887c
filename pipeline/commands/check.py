"""``pipeline check``: experiments are checked one after the other, by two real steps."""

import faulthandler
import gc
import importlib
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from functools import partial
from typing import NamedTuple

from pipeline.drive.execute import explain_problems
from pipeline.errors import ExperimentError, PipelineError, TrainingError
from pipeline.experiment.load import ExperimentFile, load
from pipeline.launch.torchrun import find_libraries
from pipeline.system import begin_stage, end_stage, undisturbed

_PRELOADED = ("pipeline.worker", "torch._dynamo")


class CheckResult(NamedTuple):
    """Problems and notes of a check."""

    error: PipelineError | None = None
    sweep: str = ""
    """The file's sweep in a line; empty without one."""
    skipped: str = ""
    """Why no batch was tried, in a sentence; empty if one was."""


def check(file: ExperimentFile, *, with_data: bool) -> CheckResult:
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
    """Yield experiment files with a function that checks them, see `check`; torch is imported if one can be read."""
    loaded = {name: _load(name, overrides) for name in names}
    _preload([file for file in loaded.values() if isinstance(file, ExperimentFile)])
    for name, file in loaded.items():
        if isinstance(file, ExperimentFile):
            yield name, partial(check, file, with_data=with_data)
        else:
            yield name, partial(CheckResult, file)


def _load(name: str, overrides: Sequence[str]) -> ExperimentFile | PipelineError:
    try:
        return load(name, overrides)
    except PipelineError as error:
        return error


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
    return CheckResult(sweep=_describe_sweep(file, allowed=allowed), skipped=skipped)


def _describe_sweep(file: ExperimentFile, *, allowed: tuple[str, ...]) -> str:
    """Describe the file's sweep, as far as it can be planned without a cluster; empty without a sweep."""
    if file.experiment.sweep is None:
        return ""
    from pipeline.commands.sweep_trial import describe_in_a_line

    return describe_in_a_line(file, file.experiment.sweep, allowed=allowed)

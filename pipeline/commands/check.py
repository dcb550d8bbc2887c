"""``pipeline check``: each file is checked in a child process, so that a crash there is an error like others."""

import gc
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from pipeline.drive.execute import explain_problems
from pipeline.errors import ExperimentError, PipelineError, TrainingError
from pipeline.experiment.load import ExperimentFile, load
from pipeline.launch.torchrun import find_libraries
from pipeline.protocol import progress
from pipeline.protocol.events import Advanced, AnyEvent
from pipeline.system import stages
from pipeline.system.child import ChildCrashedError, Report, call_in_child
from pipeline.system.imports import undisturbed
from pipeline.system.process import environment

_PRELOADED = ("pipeline.worker", "torch._dynamo")


class CheckResult(NamedTuple):
    """Problems and notes of a check."""

    error: PipelineError | None = None
    sweep: str = ""
    """The file's sweep in a line; empty without one."""
    skipped: str = ""
    """Why no batch was tried, in a sentence; empty if one was."""


def check(file: ExperimentFile, *, with_data: bool) -> CheckResult:
    """Check an experiment in a child process, and show its stage and progress here.

    Args:
        file: the experiment.
        with_data: True to load its data and weights, and to try a batch.
    """
    try:
        return call_in_child(partial(_check, file, with_data), receive=_show)
    except ChildCrashedError as error:
        return CheckResult(TrainingError(f"{file.path}: the check crashed: its process {error.how}", error.output))


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
    """Import what the checks of files need, once for all child processes.

    numpy's libraries start no threads meanwhile: a process with threads can't be forked.
    """
    named = dict.fromkeys(library for file in files for library in find_libraries(file.experiment))
    if not files:
        return
    stages.begin("importing torch")
    with environment(OMP_NUM_THREADS="1"), undisturbed():
        for module in (*_PRELOADED, *named):
            with suppress(Exception):  # the check reports it
                importlib.import_module(module)
    gc.freeze()  # a collection in a child would look through all of it
    stages.end()


def _show(message: str | Advanced) -> None:
    """Show a stage or the progress of the child."""
    if isinstance(message, str):
        stages.begin(message)
    else:
        progress.pass_on(message)


def _check(file: ExperimentFile, with_data: bool, report: Report) -> CheckResult:
    """Check an experiment in the child."""

    def receive(event: AnyEvent) -> None:
        if isinstance(event, Advanced):
            report(event)

    try:
        with stages.show_stages_on(report), progress.report_progress_to(receive):
            stages.begin(f"checking {file.path}")
            return _check_here(file, with_data=with_data, receive=receive)
    except TrainingError as error:
        return CheckResult(TrainingError(f"{file.path}: {error}", error.details))
    except PipelineError as error:
        return CheckResult(error)


def _check_here(file: ExperimentFile, *, with_data: bool, receive: Callable[[AnyEvent], None]) -> CheckResult:
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
        preflight.try_steps(file, allowed=allowed, receive=receive)
    return CheckResult(sweep=_describe_sweep(file, allowed=allowed), skipped=skipped)


def _describe_sweep(file: ExperimentFile, *, allowed: tuple[str, ...]) -> str:
    """Describe the file's sweep, as far as it can be planned without a cluster; empty without a sweep."""
    if file.experiment.sweep is None:
        return ""
    from pipeline.commands.sweep_trial import describe_in_a_line

    return describe_in_a_line(file, file.experiment.sweep, allowed=allowed)

"""Sweep to resume with ``--resume``."""

from pathlib import Path

from pipeline.commands.sweep.assignment import folder_name
from pipeline.commands.sweep.journals import state_of
from pipeline.commands.sweep.planning import SweepPlan
from pipeline.config.load import ExperimentFile
from pipeline.config.summary import flatten
from pipeline.driver.resume import LATEST, named, newest
from pipeline.errors import Problem, UsageError
from pipeline.recording.folder import RunState, read_state, shown

_MAY_CHANGE = ("sweep.trials", "sweep.concurrent", "loader.", "tracking.", "measure.", "compare", "parallel.")


def find(file: ExperimentFile, plan: SweepPlan, resume: str) -> Path:
    """Find the folder of the sweep named by `LATEST`, an id, or a folder.

    Raises:
        UsageError: there is no such sweep, it is running, or nothing is left to do.
        ExperimentError: the experiment is another one now.
    """
    directory, name = Path(file.experiment.tracking.directory), file.experiment.name
    folder = newest(file, role="sweep") if resume == LATEST else named(resume, directory)
    if folder is None:
        raise UsageError(f"--resume: {directory} has no sweep of {name}; start one without --resume")
    state = read_state(folder)
    if state.opened.tags.get("role") != "sweep":
        raise UsageError(f"--resume: {folder} is no sweep; resume it with pipeline run FILE --resume {folder.name}")
    if state.experiment.name != name:
        raise UsageError(f"--resume: {folder} is a sweep of {state.experiment.name}, not of {name}")
    if state.status == "RUNNING":
        raise UsageError(f"--resume: {folder} is still running in another process; wait for it, or stop it")
    _check_same(file, state)
    numbers = range(1, plan.sweep.total + 1)
    if all(state_of(folder / folder_name(number))[0] in ("finished", "stopped early") for number in numbers):
        message = f"all {plan.sweep.total} trials of {folder} have ended; write more sweep.trials, or start a new sweep"
        raise UsageError(f"--resume: {message}")
    return folder


def _check_same(file: ExperimentFile, state: RunState) -> None:
    """Check that the resumed trials will differ from earlier ones in their values only.

    Raises:
        ExperimentError: the experiment has changed.
    """
    experiment = shown(file.experiment)
    then_here = state.experiment.model_copy(update={"tracking": experiment.tracking})
    now, then = flatten(experiment), flatten(then_here)
    changed = [key for key in now | then if now.get(key) != then.get(key) and not key.startswith(_MAY_CHANGE)]
    if changed:
        raise file.explain(
            Problem(
                key,
                f"is {now.get(key, 'not there')}, but was {then.get(key, 'not there')} in {state.folder.name}; "
                "put it back, or start a new sweep without --resume",
            )
            for key in changed
        )

"""``--resume``: find the interrupted run, and compare its experiment with the file's."""

from collections.abc import Mapping
from pathlib import Path

from pipeline.config.load import ExperimentFile
from pipeline.config.schema import Experiment
from pipeline.config.summary import flatten
from pipeline.errors import Problem, UsageError
from pipeline.protocol.events import TrialOpened
from pipeline.recording import journal, runs
from pipeline.recording.folder import RunState, read_state, runs_named, shown

LATEST = "latest"
"""Value of ``--resume``: the run of this experiment that began last."""

_HOW_NOT_WHAT = (
    *("parallel.", "compare", "measure.", "loader.", "tracking.", "checkpoint.", "sweep"),
    *("train.compile", "train.activation_checkpointing"),
)
"""Prefixes of keys that don't affect what is trained: they may change between two sessions of a run."""
_STEP = "train.global_batch_size"
_NEW_ORDER = "the order of samples changes from here on: in an epoch under way, some come twice and others not at all"
_ORDERING = ("seed", "data.")
"""Prefixes of keys that decide which samples are in the batch of a step."""


def earlier(file: ExperimentFile, resume: str) -> RunState:
    """Find the run meant by `LATEST`, an id, or a folder.

    Raises:
        UsageError: there is no such run, it is running, or it has finished.
    """
    experiment = file.experiment
    directory = Path(experiment.tracking.directory)
    folder = newest(file) if resume == LATEST else named(resume, directory)
    if folder is None:
        raise UsageError(f"--resume: {directory} has no run of {experiment.name}; start one without --resume")
    state = read_state(folder)
    if state.experiment.name != experiment.name:
        raise UsageError(f"--resume: {folder} is a run of {state.experiment.name}, not of {experiment.name}")
    if state.status == "RUNNING":
        raise UsageError(f"--resume: {folder} is still running in another process; wait for it, or stop it")
    if state.status == "FINISHED":
        raise UsageError(f"--resume: {folder} has finished; start a new run without --resume")
    return state


def newest(file: ExperimentFile, *, role: str = "main") -> Path | None:
    """Find the newest run of a file; None if its experiment has none.

    Raises:
        UsageError: all runs of that name were started with another file.
    """
    name = file.experiment.name
    found = list(runs_named(Path(file.experiment.tracking.directory), name=name, role=role))
    own = next((folder for folder, opened in found if not _is_of_another(file, opened.file)), None)
    if found and own is None:
        folder, opened = found[0]
        raise UsageError(
            f"--resume: {folder} is a run of {opened.file}, which has the same name: {name}, as {file.path}; "
            f"resume with that file, give this one another name, or write --resume {folder.name}"
        )
    return own


def named(resume: str, directory: Path) -> Path:
    """Find the run that ``--resume RUN`` means.

    Raises:
        UsageError: no run matches, or several do.
    """
    try:
        return runs.find(resume, directory)
    except UsageError as error:
        raise UsageError(f"--resume {error}") from None


def changes(file: ExperimentFile, state: RunState, *, allowed: bool) -> list[str]:
    """Describe what has changed in the experiment since the run.

    Raises:
        ExperimentError: a change affects what is trained, unless ``allowed``; a change of the size of a step is never
            allowed.
    """
    changed = _changed(file, state)
    if _STEP in changed:
        raise file.explain([Problem(_STEP, _refusal_of_size(*changed[_STEP], state=state))])
    refused = [key for key in changed if not key.startswith(_HOW_NOT_WHAT)]
    if refused and not allowed:
        raise file.explain(
            Problem(
                key,
                f"is {_value(changed[key][1])}, but was {_value(changed[key][0])} in {state.folder.name}; "
                "put it back, or add --allow-changed",
            )
            for key in refused
        )
    notes = [f"{key} was {_value(before)}, is {_value(after)}" for key, (before, after) in changed.items()]
    if state.opened.file not in ("", file.source):
        notes.insert(0, f"{state.folder.name} was started with {state.opened.file}, not with {file.path}")
    return [*notes, _NEW_ORDER] if any(key.startswith(_ORDERING) for key in changed) else notes


def left_out(file: ExperimentFile, state: RunState) -> Mapping[str, tuple[int, ...]]:
    """Return the steps whose batch a rollback has left out, by trial: a resumed run leaves them out, too.

    With another seed or other data these steps have different batches, and none is left out.
    """
    if any(key.startswith(_ORDERING) for key in _changed(file, state)):
        return {}
    opened = (event for event in journal.read(state.folder / journal.FILE_NAME) if isinstance(event, TrialOpened))
    latest = {event.trial: event.left_out for event in opened}
    return {trial: steps for trial, steps in latest.items() if steps}


def _changed(file: ExperimentFile, state: RunState) -> dict[str, tuple[str | None, str | None]]:
    """Return the changed values by key: before and now."""
    now, then = flatten(shown(file.experiment)), flatten(_relocated(state.experiment, file.experiment))
    return {key: (then.get(key), now.get(key)) for key in now | then if then.get(key) != now.get(key)}


def _is_of_another(file: ExperimentFile, source: str) -> bool:
    """Return whether a run was started with a different file that still exists; a missing one was renamed."""
    return source not in ("", file.source) and Path(source).is_file()


def _refusal_of_size(before: str | None, after: str | None, *, state: RunState) -> str:
    """Say why a run can't be resumed with another batch size.

    The step number would no longer give the place in the data, the learning rate and the axis of every metric.
    """
    return (
        f"is {_value(after)}, but was {_value(before)} in {state.folder.name}, whose data, learning rate and metrics "
        f"all count steps of {_value(before)} samples; write {_value(before)} (more train.gradient_accumulation needs "
        "less memory for the same step), or start a new run without --resume"
    )


def _relocated(then: Experiment, now: Experiment) -> Experiment:
    """Return the earlier experiment with today's credentials and addresses of the store, which are no change."""
    return then.model_copy(update={"tracking": shown(now).tracking})


def _value(text: str | None) -> str:
    return "not there" if text is None else text

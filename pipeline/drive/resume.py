"""``--resume``: find the interrupted run, and compare its experiment with the file's."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pipeline.drive.longer import differences, is_longer, refuse_finished
from pipeline.errors import Problem, UsageError
from pipeline.experiment import references
from pipeline.experiment.load import ExperimentFile
from pipeline.experiment.summary import flatten
from pipeline.protocol.events import RunOpened
from pipeline.record import journal, runs
from pipeline.record.folder import RunState, is_listed, is_quick, read_state, read_status, runs_named
from pipeline.train.manifest import LENGTHS, rate_keys

LATEST = "latest"
"""Value of ``--resume``: see `newest`."""

_HOW_NOT_WHAT = (
    *("parallel.", "benchmark.", "loader.", "tracking.", "checkpoint.", "sweep"),
    *("train.compile", "train.cudnn_benchmark", "train.activation_checkpointing", "train.batch_size_per_worker"),
    "train.log_every_steps",
)
"""Prefixes of keys that don't affect what is trained: they may change between two sessions of a run."""
_STEP = "train.global_batch_size"
_BY_WORKER = "train.batch_size_per_worker"


def earlier(file: ExperimentFile, resume: str, *, role: Literal["main", "sweep", "study"] = "main") -> RunState:
    """Find the run, the sweep or the study meant by `LATEST`, an id, or a folder.

    Raises:
        UsageError: there is no such run, it is running, or it has finished and the file doesn't continue it; a
            finished sweep may get more trials.
        ResourceError: it is running on another machine.
    """
    state, name = state_of(file, resume, role=role), file.experiment.name
    what, folder = "run" if role == "main" else role, state.folder
    if role != "main" and state.opened.tags.get("role") != role:
        raise UsageError(
            f"--resume: {folder} is a training run, not a {role}. "
            f"Resume it with pipeline run FILE --resume {folder.name}"
        )
    if state.experiment.name != name:
        raise UsageError(f"--resume: {folder} is a {what} of {state.experiment.name}, not of {name}")
    if state.status == "RUNNING":
        journal.Journal(folder / journal.FILE_NAME).close()  # waits until it is clear whether its driver is alive
        state = read_state(folder)
    if state.status == "FINISHED" and role == "main":
        refuse_finished(file, state)
    return state


def state_of(file: ExperimentFile, resume: str, *, role: Literal["main", "sweep", "study"] = "main") -> RunState:
    """Read the state of the run or the sweep meant by `LATEST`, an id, or a folder.

    Raises:
        UsageError: there is no such run.
    """
    directory, what = Path(file.experiment.tracking.directory), "run" if role == "main" else role
    folder = newest(file, role=role) if resume == LATEST else named(resume, directory)
    if folder is None:
        message = f"--resume: {directory} has no {what} of {file.experiment.name}. Start one without --resume."
        raise UsageError(message)
    return read_state(folder)


def newest(file: ExperimentFile, *, role: str = "main") -> Path | None:
    """Find the run of a file that ``--resume`` without a name continues; None if its experiment has none.

    It is the newest run that did not complete, or else the newest completed run, which may continue for more epochs.
    Runs with ``--quick`` do not count.

    Raises:
        UsageError: all runs of that name were started with another file.
    """
    found = _runs_of(file, role=role)
    found.sort(key=lambda run: _order(run[0]))
    own = next((folder for folder, opened in found if not _is_of_another(file, opened.file)), None)
    if found and own is None:
        folder, opened = found[0]
        raise UsageError(
            f"--resume: the latest run named {file.experiment.name} is {folder}. It was started with {opened.file}, "
            f"not with {file.path}. Resume it with {opened.file}. To resume it with this file, "
            f"use --resume {folder.name}."
        )
    return own


def _order(folder: Path) -> int:
    """Return the place of a run in the order of `newest`: a run without a step is last."""
    if not is_listed(folder):
        return 2
    return int(read_status(folder) == "FINISHED")


def _runs_of(file: ExperimentFile, *, role: str = "main") -> list[tuple[Path, RunOpened]]:
    """Return the runs with the name of an experiment, the newest first, without the runs with ``--quick``."""
    found = runs_named(Path(file.experiment.tracking.directory), name=file.experiment.name, role=role)
    return [(folder, opened) for folder, opened in found if not is_quick(opened)]


def describe_newer(file: ExperimentFile, state: RunState) -> list[str]:
    """Return a note that a newer run of the file has completed, which ``--resume`` without a name leaves alone."""
    for folder, opened in _runs_of(file):
        if folder.samefile(state.folder):
            break
        if not _is_of_another(file, opened.file) and read_status(folder) == "FINISHED":
            return [
                f"--resume continues {state.folder.name}. The newer run {folder.name} is complete. "
                f"To continue that run, use --resume {folder.name}"
            ]
    return []


def named(resume: str, directory: Path) -> Path:
    """Find the run that ``--resume RUN`` means.

    Raises:
        UsageError: no run matches, or several do.
    """
    try:
        return runs.find(resume, directory)
    except UsageError as error:
        raise UsageError(f"--resume {error}") from None


def with_batch_of(file: ExperimentFile, state: RunState) -> tuple[ExperimentFile, list[str]]:
    """Keep a run's global batch if the file gives it by worker, as the run did, but for other workers; with a note."""
    train, size = file.experiment.train, state.experiment.train.global_batch_size
    began_with = state.opened.params.get(_BY_WORKER)
    if str(train.batch_size_per_worker) != began_with or train.global_batch_size == size:
        return file, []
    kept = train.model_copy(update={"global_batch_size": size, "batch_size_per_worker": None})
    note = f"The global batch size stays {size}, as at the start of {state.folder.name}."
    return replace(file, experiment=file.experiment.model_copy(update={"train": kept})), [note]


def changes(file: ExperimentFile, state: RunState, *, allowed: bool) -> list[str]:
    """Describe what has changed in the experiment since the run.

    Raises:
        ExperimentError: a change affects what is trained: only learning rates, the data and the length of the training
            may change, if that is ``allowed``. A longer training always is.
    """
    changed = _changed(file, state)
    if _STEP in changed:
        key = next(iter(file.experiment.batch_keys(file.experiment.train.global_batch_size)))
        raise file.explain([Problem(key, _refusal_of_size(*changed[_STEP], state=state, file=file))])
    lengths = LENGTHS if is_longer(file.experiment.train, state.experiment.train) else ()
    rates = rate_keys(file.experiment)
    check_same(
        file,
        state,
        may_change=(*_HOW_NOT_WHAT, *lengths),
        remedy="start a new run without --resume",
        allowable=[key for key in changed if key in rates or key.startswith((*LENGTHS, "data."))],
        is_allowed=allowed,
    )
    shown = {key: values for key, values in changed.items() if key != _BY_WORKER}  # its global batch is the same
    notes = [f"{key} was {_value(before)}, is now {_value(after)}" for key, (before, after) in shown.items()]
    if state.opened.file not in ("", file.source):
        notes.insert(0, f"{state.folder.name} was started with {state.opened.file}, not with {file.path}")
    return [*notes, *differences(file, state)]


def altered(file: ExperimentFile, state: RunState) -> list[str]:
    """Describe what has changed in the experiment since the run and may change what is computed."""
    return [
        f"{key} was {_value(before)}, is now {_value(after)}"
        for key, (before, after) in _changed(file, state).items()
        if not key.startswith((*_HOW_NOT_WHAT, "name"))
    ]


def check_same(
    file: ExperimentFile,
    state: RunState,
    *,
    may_change: tuple[str, ...],
    remedy: str,
    allowable: Collection[str] = (),
    is_allowed: bool = False,
) -> None:
    """Check that the experiment has changed only in keys with certain prefixes since the run.

    ``allowable`` keys may change with ``--allow-changed``, if ``is_allowed``.

    Raises:
        ExperimentError: other keys have changed.
    """
    changed = _changed(file, state)
    permitted = allowable if is_allowed else ()
    if refused := [key for key in changed if not (key.startswith(may_change) or key in permitted)]:
        raise file.explain(
            Problem(
                key,
                f"is {_value(changed[key][1])}, but was {_value(changed[key][0])} in {state.folder.name}. "
                f"Set it back, or {'add --allow-changed' if key in allowable else remedy}.",
            )
            for key in refused
        )


def _changed(file: ExperimentFile, state: RunState) -> dict[str, tuple[str | None, str | None]]:
    """Return the changed values by key: before and now."""
    # Other credentials or addresses of the tracking server are not a change.
    before = state.experiment.model_copy(update={"tracking": file.experiment.tracking})
    now, then, built = flatten(file.experiment), flatten(before), flatten(references.fill_in(file.experiment))
    return {
        key: (then.get(key), now.get(key)) for key in now | then if then.get(key) not in (now.get(key), built.get(key))
    }


def _is_of_another(file: ExperimentFile, source: str) -> bool:
    """Return whether a run was started with a different file that still exists; a missing one was renamed."""
    return source not in ("", file.source) and Path(source).is_file()


def _refusal_of_size(before: str | None, after: str | None, *, state: RunState, file: ExperimentFile) -> str:
    """Describe why a run can't be resumed with another batch size.

    The step number would no longer give the place in the data, the learning rate and the axis of every metric.
    """
    by_worker = file.experiment.train.batch_size_per_worker
    what, remedy = "", "Set it back to"
    if by_worker is not None:
        what, remedy = "the global batch size ", "Replace it with train.global_batch_size:"
    return (
        f"{what}cannot change from {_value(before)} to {_value(after)} when resuming {state.folder.name}. "
        f"{remedy} {_value(before)}, or start a new run without --resume. "
        "To save memory, raise train.gradient_accumulation instead."
    )


def _value(text: str | None) -> str:
    return "not set" if text is None else text

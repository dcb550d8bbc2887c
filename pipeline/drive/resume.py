"""``--resume``: find the run to go on with, compare its experiment with the file's, and tell what differs."""

import math
from collections.abc import Collection
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal

from pipeline.drive.checkpoints import describe_missing_end, iter_complete
from pipeline.errors import Problem, UsageError
from pipeline.experiment import references
from pipeline.experiment.load import ExperimentFile, flatten
from pipeline.experiment.schema import Experiment
from pipeline.experiment.train import Train
from pipeline.protocol.events import RunOpened
from pipeline.record import journal, runs
from pipeline.record.folder import RunState, is_listed, is_quick, read_state, read_status
from pipeline.record.screen import OptionalConsole, write
from pipeline.results import record
from pipeline.train.storage import LENGTHS, Storage, address_of, rate_keys

_BY_WORKER = "train.batch_size_per_worker"
_HOW_NOT_WHAT = (
    *("parallel.", "benchmark.", "loader.", "tracking.", "checkpoint.", "sweep"),
    *("train.compile", "train.cudnn_benchmark", "train.activation_checkpointing", "train.log_every_steps", _BY_WORKER),
)
"""Prefixes of keys that don't affect what is trained: they may change between two sessions of a run."""


def earlier(file: ExperimentFile, resume: str, *, role: Literal["main", "sweep"] = "main") -> RunState:
    """Find the run or the sweep meant by `runs.LATEST`, an id, or a folder."""
    directory, what = Path(file.experiment.tracking.directory), "run" if role == "main" else role
    name = file.experiment.name
    if resume == runs.LATEST:
        folder = newest(file, role=role)
    else:
        try:
            folder = runs.find(resume, directory)
        except UsageError as error:
            raise UsageError(f"--resume {error}") from None
    if folder is None:
        raise UsageError(
            f"--resume: {directory} has no {what} of {name} that has made a step. Start one without --resume."
        )
    state = read_state(folder)
    if role != "main" and state.opened.tags.get("role") != role:
        raise UsageError(
            f"--resume: {folder} is a training run, not a {role}. "
            f"Resume it with pipeline run FILE --resume {folder.name}"
        )
    if state.experiment.name != name:
        raise UsageError(f"--resume: {folder} is a {what} of {state.experiment.name}, not of {name}")
    if state.status == "RUNNING":
        journal.Journal(folder / journal.FILE_NAME).close()  # raises unless it has just ended
        state = read_state(folder)
    if state.status == "FINISHED" and role == "main":
        _check_finished(file, state)
    return state


def newest(file: ExperimentFile, *, role: str = "main") -> Path | None:
    """Find the run of a file that ``--resume`` without a name continues; None if its experiment has none.

    It is the newest run that did not complete, or else the newest completed run, which may continue for more epochs.
    Runs with ``--quick``, and runs that never made a step, do not count.
    """
    found = [(folder, opened) for folder, opened in find_runs(file.experiment, role=role) if is_listed(folder)]
    found.sort(key=lambda run: read_status(run[0]) == "FINISHED")
    # A run of a file that no longer exists is taken for this one's: the file was renamed.
    own = next(
        (one for one, opened in found if opened.file in ("", file.source) or not Path(opened.file).is_file()), None
    )
    if found and own is None:
        folder, opened = found[0]
        raise UsageError(
            f"--resume: the latest run named {file.experiment.name} is {folder}. It was started with {opened.file}, "
            f"not with {file.path}. Resume it with {opened.file}. To resume it with this file, "
            f"use --resume {folder.name}."
        )
    return own


def find_runs(experiment: Experiment, *, role: str = "main") -> list[tuple[Path, RunOpened]]:
    """Return an experiment's runs with a role, the newest first, without quick tests; warn of a damaged journal."""
    found, meant = [], (experiment.name, role)
    paths = Path(experiment.tracking.directory).glob(f"*-{experiment.name}-*/{journal.FILE_NAME}")
    for path in sorted(paths, reverse=True):  # the names of folders start with the time
        try:
            opened = journal.opened(path)
        except UsageError as error:
            warn_of_damage(str(error))
            continue
        if opened and (opened.params.get("name"), opened.tags.get("role")) == meant and not is_quick(opened):
            found.append((path.parent, opened))
    return found


@cache
def warn_of_damage(error: str) -> None:
    """Print once that a run is left out, since its journal is damaged."""
    write(OptionalConsole(stderr=True, highlight=False), f"warning: not used: {error}", style="yellow")


def is_longer(now: Train, before: Train) -> bool:
    """Return True if a run continues an earlier run: more epochs, steps or time, or different early stopping."""
    length, earlier = ((train.epochs or 0, train.steps or 0) for train in (now, before))
    if length == earlier:
        has_more_time = (now.minutes or math.inf) > (before.minutes or math.inf)
        return has_more_time or now.early_stopping != before.early_stopping
    return all(own >= old for own, old in zip(length, earlier, strict=True))


def is_continued(file: ExperimentFile, state: RunState) -> bool:
    """Return True for a finished run that the file trains on; else its report may be missing alone."""
    return state.status == "FINISHED" and is_longer(file.experiment.train, state.experiment.train)


def _check_finished(file: ExperimentFile, state: RunState) -> None:
    """Check that a finished run lacks its report, or that the file trains on and there is a checkpoint to do so."""
    if not is_continued(file, state):
        if not (state.folder / record.FILE_NAME).is_file():
            return
        raise UsageError(
            f"--resume: {state.folder} has finished. To continue it, train for more than "
            f"{state.experiment.train.length}, for example with a larger train.epochs. "
            "To train again, start a new run without --resume."
        )
    address = address_of(file.experiment.checkpoint.directory, run=state.folder)
    if not Storage(address).folders():
        raise UsageError(
            f"--resume: {state.folder} has finished, and {address} has no checkpoint. Start a new run without --resume."
        )


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
    """Check that what shapes the training has not changed since the run; describe what has, and what follows."""
    changed, rates = _find_changed(file, state), rate_keys(file.experiment)
    now, before = file.experiment.train, state.experiment.train
    check_same(
        file,
        state,
        may_change=(*_HOW_NOT_WHAT, *(LENGTHS if is_longer(now, before) else ())),
        remedy="start a new run without --resume",
        allowable=[key for key in changed if key in rates or key.startswith((*LENGTHS, "data."))],
        is_allowed=allowed,
    )
    notes = [_describe(key, *values) for key, values in changed.items() if key != _BY_WORKER]  # its batch is the same
    if state.opened.file not in ("", file.source):
        notes.insert(0, f"{state.folder.name} was started with {state.opened.file}, not with {file.path}")
    address = address_of(file.experiment.checkpoint.directory, run=state.folder)
    last = next(iter_complete(address), None) if is_continued(file, state) else None
    if last is not None and (note := describe_missing_end(last.step, folder=state.folder)):
        notes.append(f"{note} Training continues from the checkpoint.")
    for key, value in flatten(file.experiment).items() if now.length != before.length else ():
        if "${total_steps}" in value:
            notes.append(
                f"{key}: {value} follows from {now.length} now. The steps before the checkpoint used the schedule for "
                f"{before.length}, so the result differs from a run of {now.length} started from scratch."
            )
    return notes


def altered(file: ExperimentFile, state: RunState) -> list[str]:
    """Describe what has changed in the experiment since the run and may change what is computed."""
    changed = _find_changed(file, state).items()
    return [_describe(key, *values) for key, values in changed if not key.startswith((*_HOW_NOT_WHAT, "name"))]


def check_same(
    file: ExperimentFile,
    state: RunState,
    *,
    may_change: tuple[str, ...],
    remedy: str,
    allowable: Collection[str] = (),
    is_allowed: bool = False,
) -> None:
    """Check that since the run only keys with certain prefixes changed, or ``allowable`` ones if ``is_allowed``."""
    problems = [
        Problem(
            key,
            f"is {now or 'not set'}, but was {before or 'not set'} in {state.folder.name}. "
            f"Set it back, or {'add --allow-changed' if key in allowable else remedy}.",
        )
        for key, (before, now) in _find_changed(file, state).items()
        if not key.startswith(may_change) and not (is_allowed and key in allowable)
    ]
    if problems:
        raise file.explain(problems)


def _find_changed(file: ExperimentFile, state: RunState) -> dict[str, tuple[str | None, str | None]]:
    """Return the changed values by key: before and now; the values of environment variables are resolved."""
    # Other credentials or addresses of the tracking server are not a change.
    before = state.experiment.model_copy(update={"tracking": file.experiment.tracking})
    now, then, built = flatten(file.experiment), flatten(before), flatten(references.fill_in(file.experiment))
    return {
        key: (then.get(key), now.get(key)) for key in now | then if then.get(key) not in (now.get(key), built.get(key))
    }


def _describe(key: str, before: str | None, now: str | None) -> str:
    return f"{key} was {before or 'not set'}, is now {now or 'not set'}"

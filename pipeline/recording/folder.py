"""The folder of a run: made for a new one, found again for one that is to go on."""

import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from errno import EDQUOT, ENOENT, ENOSPC
from pathlib import Path
from typing import Literal

from pipeline.config.load import load
from pipeline.config.schema import Experiment
from pipeline.config.summary import to_yaml
from pipeline.config.uris import without_credentials
from pipeline.config.values import Frozen
from pipeline.errors import ResourceError, UsageError
from pipeline.planning.plan import Plan
from pipeline.protocol.events import RunOpened
from pipeline.protocol.trial import Status
from pipeline.recording import journal, provenance

EXPERIMENT_NAME = "experiment.yaml"
ENVIRONMENT_NAME = "environment.txt"
_TRIAL = re.compile(r"trial-\d+")


class RunState(Frozen):
    """What a run's folder says about it."""

    folder: Path
    experiment: Experiment
    """As it was run, without the credentials of its tracking store; see `shown`."""
    opened: RunOpened
    """Its first event."""
    status: Status | Literal["RUNNING"]
    """RUNNING while a driver writes to the journal; KILLED if none has closed it."""


def create(plan: Plan) -> Path:
    """A folder for a new run.

    Raises:
        ResourceError: it can't be created.
    """
    root = Path(plan.experiment.tracking.directory)
    command = "" if plan.command == "run" else f"{plan.command}-"
    name = f"{datetime.now():%Y%m%d-%H%M%S}-{plan.experiment.name}-{command}{secrets.token_hex(2)}"
    try:
        (root / name).mkdir(parents=True)
    except OSError as error:
        raise ResourceError(
            f"tracking.directory: {root} can't be written: {error.strerror}; name another folder"
        ) from error
    return root / name


def is_trial(name: str) -> bool:
    """Whether a folder of that name inside a sweep's is a trial's."""
    return _TRIAL.fullmatch(name) is not None


def sweep_of(folder: Path) -> str:
    """Id of the sweep that a run is a trial of, whose folder its own lies in; empty for other runs."""
    return folder.absolute().parent.name if is_trial(folder.name) else ""


def id_of(folder: Path) -> str:
    """Id of a run: the name of its folder, after that of its sweep if it has one."""
    sweep = sweep_of(folder)
    return f"{sweep}/{folder.name}" if sweep else folder.name


def trials_of(folder: Path) -> list[Path]:
    """The folders of a sweep's trials that have begun, in their order; none for other runs."""
    there = (path.parent for path in folder.glob(f"trial-*/{journal.FILE_NAME}"))
    return sorted((each for each in there if is_trial(each.name)), key=lambda each: (len(each.name), each.name))


def shown(experiment: Experiment) -> Experiment:
    """The experiment as it may be written down: without credentials."""
    tracking = experiment.tracking.model_copy(update={"uri": without_credentials(experiment.tracking.uri)})
    return experiment.model_copy(update={"tracking": tracking})


def describe(experiment: Experiment, folder: Path) -> tuple[str, ...]:
    """Write down what is run and with which packages; returns the names of the files.

    Raises:
        OSError: they can't be written; what was there before is as it was.
    """
    text = to_yaml(shown(experiment))
    _replace(folder / EXPERIMENT_NAME, lambda path: path.write_text(text, encoding="utf-8"))
    _replace(folder / ENVIRONMENT_NAME, provenance.write_environment)
    return EXPERIMENT_NAME, ENVIRONMENT_NAME


def runs_named(directory: Path, *, name: str, role: str = "main") -> Iterator[tuple[Path, RunOpened]]:
    """Yield the folders of an experiment's runs and their first events, the run that began last first.

    Args:
        directory: where runs are, ``tracking.directory``.
        name: of the experiment.
        role: main for a training, or the command that made it.
    """
    for folder in sorted(directory.glob(f"*-{name}-*"), reverse=True):  # their names begin with the time
        path = folder / journal.FILE_NAME
        opened = _opened(path) if path.is_file() else None
        if opened is not None and opened.params.get("name") == name and opened.tags.get("role") == role:
            yield folder, opened


def read_state(folder: Path) -> RunState:
    """What a run's folder says about it.

    Raises:
        UsageError: it isn't the folder of a run, or its journal is damaged.
        ExperimentError: its experiment.yaml is damaged.
    """
    path = folder / journal.FILE_NAME
    opened = _opened(path)
    if opened is None:
        raise UsageError(f"{folder}: this run ended before it began; start a new one")
    end = journal.ending(path)
    status: Status | Literal["RUNNING"] = "RUNNING" if journal.is_open(path) else end.status if end else "KILLED"
    experiment = load(folder / EXPERIMENT_NAME).experiment
    return RunState(folder=folder, experiment=experiment, opened=opened, status=status)


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turn a full disk, a deleted folder and an unwritable journal into an error that says so.

    Raises:
        ResourceError: a file inside can't be written.
    """
    path = folder / journal.FILE_NAME
    try:
        yield
    except OSError as error:
        if error.errno in {ENOSPC, EDQUOT}:
            raise ResourceError(
                f"{error.filename or folder}: the disk is full; make room (--resume then continues from the newest "
                "checkpoint), or name another tracking.directory"
            ) from error
        if error.errno == ENOENT and not path.exists():
            raise ResourceError(f"{folder} was deleted while its run went on, so the run was stopped") from error
        if error.filename == str(path):
            raise ResourceError(f"{path} can't be written, so the run was stopped: {error.strerror}") from error
        raise


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        write(partial)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _opened(path: Path) -> RunOpened | None:
    first = next(iter(journal.read(path)), None)
    return first if isinstance(first, RunOpened) else None

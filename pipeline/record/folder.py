"""Folder of a run: its name, its files, and its state by the journal."""

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from errno import EDQUOT, ENOENT, ENOSPC
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import BaseModel, ValidationError

from pipeline.errors import ResourceError, UsageError
from pipeline.experiment.load import load
from pipeline.experiment.schema import Experiment
from pipeline.experiment.values import Frozen
from pipeline.plan.plan import Plan
from pipeline.protocol.events import REASONS_TO_KEEP, RunClosed, RunOpened, is_reason_to_keep
from pipeline.protocol.trial import Status
from pipeline.record import journal

EXPERIMENT_NAME = "experiment.yaml"
ENVIRONMENT_NAME = "environment.txt"
LOG_NAME = "log.txt"
_TRIAL = re.compile(r"trial-\d+")


class RunState(Frozen):
    """State of a run, read from its folder."""

    folder: Path
    experiment: Experiment  # Experiment as it was run, without the credentials of its tracking store
    opened: RunOpened  # First event of the journal
    status: Status | Literal["RUNNING"]
    """RUNNING while a driver writes to the journal; KILLED if its driver died without closing it."""


class FolderFile(BaseModel):
    """State that is kept in a file of a folder."""

    file_name: ClassVar[str]

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Read the state from a folder; None if it is missing or damaged."""
        try:
            return cls.model_validate_json((folder / cls.file_name).read_bytes())
        except (OSError, ValidationError):
            return None

    def keep(self, folder: Path) -> None:
        """Write the state into a folder; another process may read it at any time."""
        write_atomically(folder / self.file_name, self.model_dump_json(indent=1) + "\n")


def create(plan: Plan) -> Path:
    """Create the folder of a new run."""
    root = Path(plan.experiment.tracking.directory)
    command = "" if plan.command == "run" else f"{plan.command}-"
    name = f"{datetime.now():%Y%m%d-%H%M%S}-{plan.experiment.name}-{command}{secrets.token_hex(2)}"
    try:
        (root / name).mkdir(parents=True)
    except OSError as error:
        raise ResourceError(
            f"tracking.directory: {root} can't be written: {error.strerror}. Name another folder."
        ) from error
    return root / name


def is_trial(name: str) -> bool:
    """Return True if a folder with this name, inside a sweep's folder, belongs to a trial."""
    return _TRIAL.fullmatch(name) is not None


def sweep_of(folder: Path) -> str:
    """Return the id of the sweep whose folder contains this trial's; empty if the run is not a trial."""
    return folder.absolute().parent.name if is_trial(folder.name) else ""


def id_of(folder: Path) -> str:
    """Return the id of a run: the name of its folder, after the sweep's if it is a trial."""
    return f"{sweep_of(folder)}/{folder.name}".removeprefix("/")


def trials_of(folder: Path) -> list[Path]:
    """Return the folders of a sweep's trials that have started, by number; empty if the run is not a sweep."""
    started = [path.parent for path in folder.glob(f"trial-*/{journal.FILE_NAME}") if is_trial(path.parent.name)]
    return sorted(started, key=lambda trial: (len(trial.name), trial.name))


def read_state(folder: Path) -> RunState:
    """Read the state of a run from its folder."""
    opened = journal.opened(folder / journal.FILE_NAME)
    if opened is None:
        raise UsageError(f"{folder}: this run failed before it started. Start a new run.")
    experiment = load(folder / EXPERIMENT_NAME).experiment
    return RunState(folder=folder, experiment=experiment, opened=opened, status=read_status(folder))


def read_status(folder: Path) -> Status | Literal["RUNNING"]:
    """Read the status of a run from its journal; see `RunState`."""
    path = folder / journal.FILE_NAME
    end = journal.ending(path)
    return "RUNNING" if journal.is_open(path) else end.status if end else "KILLED"


def is_quick(opened: RunOpened) -> bool:
    """Return True for ``run --quick``, whose model is not trained."""
    return opened.tags.get("quick") == "true"


def is_kept(folder: Path) -> bool:
    """Return True unless a run ended before its first step, in each of its sessions; see `is_reason_to_keep`."""
    return any(map(is_reason_to_keep, journal.marked(folder / journal.FILE_NAME, *REASONS_TO_KEEP)))


def is_listed(folder: Path) -> bool:
    """Return True for a run that is kept or is running."""
    return is_kept(folder) or journal.is_open(folder / journal.FILE_NAME)


def killed(*, at: float) -> RunClosed:
    """Return the end of a run whose driver was killed, at the time of its last event."""
    return RunClosed(time=at, status="KILLED", message="The driver was killed before it could end the run.")


@contextmanager
def explain_os_errors(folder: Path) -> Iterator[None]:
    """Convert the OSError of a full disk, a deleted folder or an unwritable journal to an error for the user."""
    path = folder / journal.FILE_NAME
    try:
        yield
    except OSError as error:
        if error.errno in {ENOSPC, EDQUOT}:
            raise ResourceError(
                f"{error.filename or folder}: the disk is full. Free some space and use --resume, which continues from "
                "the latest checkpoint. Or set another tracking.directory."
            ) from error
        if error.errno == ENOENT and not path.exists():
            raise ResourceError(f"{folder} was deleted during the run, so the run was stopped") from error
        if error.filename == str(path):
            raise ResourceError(f"{path} can't be written, so the run was stopped: {error.strerror}") from error
        raise


def write_atomically(path: Path, text: str) -> None:
    """Write a text file, so that a kill leaves the old one or the new one."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise

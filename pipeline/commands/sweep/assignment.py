"""What passes between the sweep, Ray Tune's actors and the processes of the trials."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.config.values import Frozen

RECORD_NAME = "trial.json"
"""Name of a `Record` in a trial's folder."""

AFTER_GRACE_S = 15.0
"""Seconds beyond ``parallel.grace_s`` that a trial has to close its journal and send the rest to the tracking store."""


class Record(Frozen):
    """What is known of a trial before it begins, kept in its folder."""

    number: int
    """From 1."""
    values: Mapping[str, Any]
    """By dotted key."""
    failure: str = ""
    """Why its process ended without a journal."""
    stopped_after: int | None = None
    """Epochs that it was judged by when it was stopped early; it may have trained some more before it ended."""

    @classmethod
    def read(cls, folder: Path) -> "Record | None":
        """That of a trial's folder; None if there is none, or half of one."""
        try:
            return cls.model_validate_json((folder / RECORD_NAME).read_bytes())
        except (OSError, ValidationError):
            return None

    def keep(self, folder: Path) -> None:
        """Write it into the trial's folder, whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{RECORD_NAME}.partial"
        partial.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        partial.replace(folder / RECORD_NAME)


class Suggestion(Frozen):
    """What Ray Tune hands to a trial; it ends up in Tune's own files."""

    number: int
    values: Mapping[str, Any]
    problem: str = ""
    """Why these values can't be trained together; empty if they can."""


class TrialJob(Frozen):
    """What all trials of a sweep have in common. It may hold secrets: it goes through memory and pipes only."""

    file: str
    overrides: tuple[str, ...]
    """Those of the command line."""
    common: Mapping[str, Any]
    """Values that all trials have, by dotted key."""
    cwd: str
    folder: str
    """The sweep's, absolute."""
    metric: str
    logs_models: bool
    """Whether each trial sends its model to the tracking store; else the sweep sends the best one's."""
    grace_s: float
    """Seconds that a trial has to write its checkpoint when it is stopped."""
    verbose: bool
    variables: tuple[str, ...]
    """Names of the environment variables that the user has; Ray adds its own."""

    def folder_of(self, number: int) -> Path:
        """Of a trial."""
        return Path(self.folder) / folder_name(number)

    def environment(self) -> dict[str, str]:
        """That of a trial's process, in which Ray has restricted the GPUs."""
        kept = {*self.variables, "CUDA_VISIBLE_DEVICES"} - {"RAY_ADDRESS"}  # parallel.address says it
        return {name: value for name, value in os.environ.items() if name in kept}


class Assignment(Frozen):
    """One trial, completely described; its process reads it from its standard input."""

    job: TrialJob
    number: int
    values: Mapping[str, Any]
    config_hash: str = ""
    """Of the experiment as the sweep has read it: the file may change meanwhile."""


def folder_name(number: int) -> str:
    """Name of a trial's folder inside the sweep's."""
    return f"trial-{number:03}"

"""Data shared by the sweep, Ray Tune's actors and the processes of the trials."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.experiment.load import ExperimentFile, override
from pipeline.experiment.values import Direction, Frozen

RECORD_NAME = "trial.json"
"""Name of a `Record` in a trial's folder."""

AFTER_GRACE_S = 15.0
"""Seconds beyond ``parallel.grace_s`` that a trial has to close its journal and send the rest to the tracking store."""


class Record(Frozen):
    """Number, values and end of a trial, kept in its folder once it is started."""

    number: int
    """Number of the trial, from 1."""
    values: Mapping[str, Any]
    """Values by dotted key."""
    variant: str = ""
    """Name of the variant that it trains, in a study of ``pipeline compare``; empty in a sweep."""
    failure: str = ""
    """Reason why the trial failed; else empty."""
    lacked: str = ""
    """Resources that the cluster lacked when the trial was last tried. Empty if it lacked none."""
    stopped_after: int | None = None
    """Epochs after which Ray Tune stopped the trial early; it may have trained more before it ended."""

    @property
    def title(self) -> str:
        """Title of the trial, e.g. "trial 3: optimizer.lr=0.01, model.width=64", or "B, seed 18" in a study."""
        if self.variant:
            return f"{self.variant}, seed {self.values['seed']}"
        return f"trial {self.number}: {', '.join(override(key, value) for key, value in self.values.items())}"

    @classmethod
    def read(cls, folder: Path) -> "Record | None":
        """Read the record of a trial's folder; None if it is missing or incomplete."""
        try:
            return cls.model_validate_json((folder / RECORD_NAME).read_bytes())
        except (OSError, ValidationError):
            return None

    def keep(self, folder: Path) -> None:
        """Write the record into the trial's folder atomically."""
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{RECORD_NAME}.partial"
        partial.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        partial.replace(folder / RECORD_NAME)


@dataclass(frozen=True)
class TrialJob:
    """Settings shared by all trials. They may contain secrets: passed in memory and pipes only."""

    files: Mapping[str, ExperimentFile]
    """Experiment of each variant as it was read, without the values of a trial; a sweep has one, without a name."""
    cwd: str
    folder: Path
    """Absolute path of the folder of the sweep, or of the study."""
    metric: str
    direction: Direction
    """Direction in which the metric improves."""
    logs_models: bool
    """True if each trial sends its model to the tracking store; otherwise the sweep sends the best model."""
    shares_cluster: bool
    """True if the trials' workers run on a cluster, where other jobs may have taken their resources."""
    verbose: bool
    variables: tuple[str, ...]
    """Names of the user's environment variables, to which Ray adds some."""

    @property
    def grace_s(self) -> float:
        """Seconds that a trial has to write its checkpoint and to end when it is stopped."""
        return max(file.experiment.parallel.grace_s for file in self.files.values()) + AFTER_GRACE_S

    def file_of(self, record: Record) -> ExperimentFile:
        """Return the experiment of a trial."""
        return self.files[record.variant].vary(record.values)

    def folder_of(self, number: int) -> Path:
        """Return the folder of a trial."""
        return self.folder / folder_name(number)

    def environment(self) -> dict[str, str]:
        """Return the environment of a trial's process, with the GPUs that Ray assigned to this one."""
        kept = {*self.variables, "CUDA_VISIBLE_DEVICES"} - {"RAY_ADDRESS"}  # parallel.address says it
        return {name: value for name, value in os.environ.items() if name in kept}


def folder_name(number: int) -> str:
    """Return the name of a trial's folder inside the sweep's."""
    return f"trial-{number:03}"

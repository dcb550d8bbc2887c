"""The manifest of a checkpoint, written last. A checkpoint without one, or with different files, is incomplete."""

import hashlib
import re
import time
from collections.abc import Mapping
from importlib.metadata import version
from io import BufferedReader
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError

from pipeline.config.schema import Experiment
from pipeline.config.values import Frozen

if TYPE_CHECKING:
    from pipeline.training.context import TrainContext

FILE_NAME = "manifest.json"
VALUES = "values.json"
"""File of all state but tensors."""
_ASIDE: Mapping[str, Any] = {
    **dict.fromkeys(("name", "tracking", "compare", "measure", "checkpoint", "loader", "parallel", "sweep"), True),
    "train": {"compile", "activation_checkpointing"},
}
_FOLDER = re.compile(r"step-(\d{8,})")


class StoredFile(Frozen):
    """A file of a checkpoint."""

    name: str
    size: int
    """Bytes."""
    sha256: str


class Manifest(Frozen):
    """Description and file list of a checkpoint; the checkpoint is complete if this exists and `digest` matches."""

    format: int = 1
    step: int
    """Optimizer steps done."""
    epoch: int
    """Epochs done."""
    steps_per_epoch: int
    global_batch_size: int
    world_size: int
    """Number of workers that trained up to this step."""
    time: float
    """Seconds since the epoch."""
    versions: Mapping[str, str]
    """Versions of torch and of this project."""
    experiment: Mapping[str, Any]
    """The part of the experiment file that decides what is trained, see `trained`."""
    data_digest: str
    metric: float | None = None
    """The value of ``checkpoint.best`` at this step, if it was evaluated here."""
    files: tuple[StoredFile, ...]
    digest: str = Field(default="", repr=False)
    """SHA-256 of all other fields."""

    @property
    def name(self) -> str:
        """Name of the checkpoint's folder."""
        return folder_name(self.step)

    @property
    def megabytes(self) -> float:
        """Total size of the files, in MiB."""
        return sum(file.size for file in self.files) / 2**20

    @property
    def config_hash(self) -> str:
        """Hash of what is trained; equal for runs that train the same."""
        return config_hash(self.experiment)

    def sealed(self) -> "Manifest":
        """Return a copy with its digest."""
        return self.model_copy(update={"digest": self._digest()})

    def is_sealed(self) -> bool:
        """Return True if the digest matches the other fields."""
        return self.digest == self._digest()

    def _digest(self) -> str:
        return hashlib.sha256(self.model_dump_json(exclude={"digest"}).encode()).hexdigest()


def parse(content: bytes) -> Manifest | None:
    """Parse a manifest; None if it is invalid or its digest doesn't match."""
    try:
        manifest = Manifest.model_validate_json(content)
    except ValidationError:
        return None
    return manifest if manifest.is_sealed() else None


def folder_name(step: int) -> str:
    """Return the folder name of a step's checkpoint, e.g. "step-00000123"."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step that a checkpoint's folder name stands for; None for any other name."""
    match = _FOLDER.fullmatch(name)
    return int(match[1]) if match else None


def trained(experiment: Experiment) -> Mapping[str, Any]:
    """Dump the part of an experiment that decides what is trained, without parallelism, measuring and tracking."""
    return experiment.model_dump(mode="json", exclude=dict(_ASIDE))


def config_hash(part: Mapping[str, Any]) -> str:
    """Return a hash of 12 hex digits of `trained`'s result, whatever the order of its keys."""
    return hashlib.sha256(repr(_sorted(part)).encode()).hexdigest()[:12]


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return [(key, _sorted(value[key])) for key in sorted(value)]
    return [_sorted(item) for item in value] if isinstance(value, list | tuple) else value


def sha256(file: BufferedReader) -> str:
    """Return the SHA-256 of a file's content from its current position."""
    return hashlib.file_digest(file, "sha256").hexdigest()


def describe(context: "TrainContext", *, step: int, metric: float | None) -> Manifest:
    """Make the manifest, without files, of a checkpoint after ``step`` steps.

    Args:
        context: the training's context.
        step: optimizer steps done.
        metric: the value of ``checkpoint.best``, if it was measured at this step.
    """
    order = context.order
    return Manifest(
        step=step,
        epoch=step // order.steps_per_epoch,
        steps_per_epoch=order.steps_per_epoch,
        global_batch_size=order.global_batch_size,
        world_size=context.rank.world_size,
        time=time.time(),
        versions={name: version(name) for name in ("torch", "ddp-pipeline")},
        experiment=trained(context.experiment),
        data_digest=context.batches.digest,
        metric=metric,
        files=(),
    )

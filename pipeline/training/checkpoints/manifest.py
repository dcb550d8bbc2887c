"""What a checkpoint says about itself. One without a manifest, or with another content than it lists, is not whole."""

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
"""All of the state that is no tensor."""
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
    """Written last; its presence and `digest` make a checkpoint a checkpoint."""

    format: int = 1
    step: int
    """Optimizer steps done."""
    epoch: int
    """Epochs done."""
    steps_per_epoch: int
    global_batch_size: int
    world_size: int
    """Workers that trained until here."""
    time: float
    """Seconds since the epoch."""
    versions: Mapping[str, str]
    """Of torch and of this project."""
    experiment: Mapping[str, Any]
    """The part of the experiment file that decides what is trained, see `trained`."""
    data_digest: str
    metric: float | None = None
    """The value of ``checkpoint.best`` at this step, if it was evaluated here."""
    files: tuple[StoredFile, ...]
    digest: str = Field(default="", repr=False)
    """Of all the rest."""

    @property
    def name(self) -> str:
        """The checkpoint's folder."""
        return folder_name(self.step)

    @property
    def megabytes(self) -> float:
        """Size of all files."""
        return sum(file.size for file in self.files) / 2**20

    @property
    def config_hash(self) -> str:
        """Two runs with the same hash train the same."""
        return config_hash(self.experiment)

    def sealed(self) -> "Manifest":
        """With its digest."""
        return self.model_copy(update={"digest": self._digest()})

    def is_sealed(self) -> bool:
        """Whether nothing has changed since it was sealed."""
        return self.digest == self._digest()

    def _digest(self) -> str:
        return hashlib.sha256(self.model_dump_json(exclude={"digest"}).encode()).hexdigest()


def parse(content: bytes) -> Manifest | None:
    """The manifest, or None if it isn't a whole one."""
    try:
        manifest = Manifest.model_validate_json(content)
    except ValidationError:
        return None
    return manifest if manifest.is_sealed() else None


def folder_name(step: int) -> str:
    """Where the checkpoint of a step lies, e.g. "step-00000123"."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's folder; None for other names."""
    match = _FOLDER.fullmatch(name)
    return int(match[1]) if match else None


def trained(experiment: Experiment) -> Mapping[str, Any]:
    """The part of an experiment that decides what is trained: not how it is spread, measured, tracked or kept."""
    return experiment.model_dump(mode="json", exclude=dict(_ASIDE))


def config_hash(part: Mapping[str, Any]) -> str:
    """12 hex digits of `trained`'s part of an experiment; the order of keys doesn't matter."""
    return hashlib.sha256(repr(_sorted(part)).encode()).hexdigest()[:12]


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return [(key, _sorted(value[key])) for key in sorted(value)]
    return [_sorted(item) for item in value] if isinstance(value, list | tuple) else value


def sha256(file: BufferedReader) -> str:
    """Of a file's content, from where it stands."""
    return hashlib.file_digest(file, "sha256").hexdigest()


def describe(context: "TrainContext", *, step: int, metric: float | None) -> Manifest:
    """The manifest, without files, of a checkpoint after ``step`` steps.

    Args:
        context: what trains.
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
        data_digest=context.data_digest,
        metric=metric,
        files=(),
    )

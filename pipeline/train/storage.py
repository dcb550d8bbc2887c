"""Storage of checkpoints: a folder, or any address that fsspec knows (s3://bucket/x, gs://..., memory://...).

The manifest of a checkpoint is written last. A checkpoint without a manifest, or with different files, is incomplete.
Commands list, verify and choose checkpoints without torch.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import fsspec
from fsspec.implementations.local import LocalFileSystem
from pydantic import Field, ValidationError, field_serializer

from pipeline.errors import ExperimentError, UsageError
from pipeline.experiment import keys
from pipeline.experiment.schema import Experiment
from pipeline.experiment.uris import has_password, without_credentials
from pipeline.experiment.values import Direction, Frozen

_KEY = "checkpoint.directory"


def address_of(directory: str | None, *, run: Path) -> str:
    """Return the address of the checkpoints of a run, whose folder has its id, by ``checkpoint.directory``."""
    if directory is None:
        return str(run.resolve() / "checkpoints")
    if "://" in directory:
        return f"{directory.rstrip('/')}/{run.name}"
    return str(Path(directory).expanduser().resolve() / run.name)


class Storage:
    """Checkpoints at one address, each in a folder; all names are relative to the address.

    Errors of the storage itself are raised as the file system's own exceptions.
    """

    def __init__(self, address: str) -> None:
        """Parse an address, without creating or contacting anything, or raise ExperimentError."""
        self.address = address
        if has_password(address):
            raise ExperimentError.of(
                _KEY,
                f"{without_credentials(address)} has a password, which would be recorded with the run. Set the "
                "password in the environment, e.g. AWS_SECRET_ACCESS_KEY.",
            )
        try:
            self._fs, self._root = fsspec.core.url_to_fs(address)
        except ImportError as error:
            raise ExperimentError.of(_KEY, f"{address} needs a package: {error} (on every node)") from error
        except ValueError as error:
            raise ExperimentError.of(
                _KEY, f"{address}: {error}. Use a folder, or an address such as s3://bucket/folder."
            ) from error
        self.is_local = isinstance(self._fs, LocalFileSystem)

    def place(self, name: str) -> str:
        """Return the address of a file or folder."""
        return f"{self.address.rstrip('/')}/{name}"

    def folders(self) -> list[str]:
        """List the names of all folders."""
        self._fs.invalidate_cache()  # other processes write here, too
        try:
            entries = self._fs.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        return [entry["name"].rstrip("/").rsplit("/", 1)[-1] for entry in entries if entry["type"] == "directory"]

    def read(self, name: str) -> bytes:
        """Read a small file."""
        with self._fs.open(self._path(name), "rb") as file:
            return bytes(file.read())

    def write(self, name: str, content: bytes) -> None:
        """Write a small file atomically."""
        if not self.is_local:
            self._fs.pipe_file(self._path(name), content)  # a single object, visible once it is complete
            return
        path = Path(self._path(name))
        partial = path.with_name(f".{path.name}.partial")
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        _sync(path.parent)

    def remove(self, name: str) -> None:
        """Remove a file or a folder, if it exists."""
        with suppress(FileNotFoundError):
            self._fs.rm(self._path(name), recursive=True)

    @contextmanager
    def staging(self, folder: str) -> Iterator[Path]:
        """Provide a local folder whose files are stored in ``folder`` after the block."""
        if self.is_local:
            path = Path(self._path(folder))
            path.mkdir(parents=True, exist_ok=True)
            yield path
            _sync(path)
            _sync(path.parent)
            return
        with TemporaryDirectory(prefix="checkpoint-") as temporary:
            yield Path(temporary)
            for file in sorted(Path(temporary).iterdir()):
                self._fs.put_file(str(file), self._path(f"{folder}/{file.name}"))

    @contextmanager
    def fetched(self, folder: str) -> Iterator[Path]:
        """Provide a local, read-only copy of ``folder``; the folder itself if the storage is local."""
        if self.is_local:
            yield Path(self._path(folder))
            return
        with TemporaryDirectory(prefix="checkpoint-") as temporary:
            for path in self._fs.find(self._path(folder)):
                self._fs.get_file(path, str(Path(temporary) / path.rsplit("/", 1)[-1]))
            yield Path(temporary)

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"


def _sync(folder: Path) -> None:
    """Make the names in a folder survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


FILE_NAME = "manifest.json"
_ASIDE: Mapping[str, Any] = {
    **dict.fromkeys(("name", "tracking", "benchmark", "checkpoint", "loader", "parallel", "sweep"), True),
    "train": {"compile", "activation_checkpointing", "cudnn_benchmark", "log_every_steps", "batch_size_per_worker"},
}
"""Keys that don't decide what is trained; ``batch_size_per_worker`` stands for a global batch size."""
FORMAT = 3
LENGTHS = ("train.epochs", "train.steps", "train.minutes", "train.early_stopping")
"""Beginnings of keys that decide how long a training is, and may differ when it resumes: the driver checks how."""
_FOLDER = re.compile(r"step-(\d{8,})")


class DataDigest(Frozen):
    """Hashes of a few samples, by which a resumed training notices that its data has changed."""

    sizes: Mapping[str, int]  # Samples of each set: training, validation, test; of a set without a length 0
    samples: Mapping[str, str]  # Hashes by name, e.g. of "sample 17 of the training set".
    left_out: int = 0  # Samples that can't be compared: they differed between two readings, or could not be read

    def text(self, declaration: str) -> str:
        """Return a short hash of the data and its declaration."""
        parts = (declaration, *self.sizes.items(), *sorted(self.samples.items()))
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


class StoredFile(Frozen):
    """A file of a checkpoint."""

    name: str
    size: int  # Bytes
    sha256: str

    @classmethod
    def describe(cls, path: Path) -> "StoredFile":
        """Describe a file that is written."""
        return cls(name=path.name, size=path.stat().st_size, sha256=_sha256(path))


class Manifest(Frozen):
    """Description and file list of a checkpoint; the checkpoint is complete if this exists and `digest` matches."""

    format: int = FORMAT
    step: int  # Optimizer steps done
    epoch: int  # Epochs done
    steps_per_epoch: int
    global_batch_size: int
    world_size: int  # Number of workers that trained up to this step
    time: float  # Seconds since the epoch
    versions: Mapping[str, str]  # Versions of torch and of this project
    experiment: Mapping[str, Any]  # The part of the experiment file that decides what is trained, see `trained`
    data_digest: str
    data: DataDigest | None = None
    """Samples of the data, to compare them when a run resumes; None on other ranks than the first."""
    metric: float | None = None  # The value of ``checkpoint.best`` at this step, if it was evaluated here
    metric_name: str | None = None  # Name of the metric; None without a value
    files: tuple[StoredFile, ...]
    digest: str = Field(default="", repr=False)  # SHA-256 of all other fields

    @property
    def name(self) -> str:
        """Name of the checkpoint's folder."""
        return folder_name(self.step)

    def rate_by(self, name: str | None) -> "Manifest":
        """Return it without its value if that is of another metric, which can't be compared."""
        return self if self.metric_name == name else self.model_copy(update={"metric": None})

    def seal(self) -> "Manifest":
        """Return a copy with its digest."""
        return self.model_copy(update={"digest": self._digest()})

    def is_sealed(self) -> bool:
        """Return True if the digest matches the other fields."""
        return self.digest == self._digest()

    def _digest(self) -> str:
        return hashlib.sha256(self.model_dump_json(exclude={"digest"}).encode()).hexdigest()

    @field_serializer("metric", when_used="json")
    def _written_as_json(self, metric: float | None) -> float | str | None:
        """Return a number that JSON has, or its name."""
        return metric if metric is None or math.isfinite(metric) else json.dumps(metric)


def parse(content: bytes) -> Manifest | None:
    """Parse a manifest; None if it is invalid or its digest doesn't match."""
    with suppress(ValueError):
        values = json.loads(content)
        if isinstance(values, dict) and values.get("format", FORMAT) != FORMAT:
            raise UsageError(
                f"step {values.get('step')}: this checkpoint has format {values['format']}, and this version of "
                f"pipeline reads format {FORMAT}. Use the version that saved it, or start a new run."
            )
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


def dump_trained(experiment: Experiment) -> Mapping[str, Any]:
    """Dump the part of an experiment that decides what is trained, without parallelism, measuring and tracking."""
    return experiment.model_dump(mode="json", exclude=dict(_ASIDE))


def rate_keys(experiment: Experiment) -> tuple[str, ...]:
    """Return the keys of learning rates, which may differ in a resumed training if the user allows that."""
    return "optimizer.lr", *(f"optimizers.{name}.lr" for name in experiment.optimizers)


def changes(before: Any, now: Any, *, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield each key that differs between two results of `dump_trained`, and its values."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        is_another = before.get("_target_") != now.get("_target_")  # whose arguments are its own
        for name in ("_target_",) if is_another else dict.fromkeys((*before, *now)):
            yield from changes(before.get(name), now.get(name), key=keys.child(key, name))
    elif isinstance(before, list | tuple) and isinstance(now, list | tuple) and len(before) == len(now):
        for index, (old, new) in enumerate(zip(before, now, strict=True)):
            yield from changes(old, new, key=keys.child(key, index))
    elif before != now:
        yield key, before, now


class Entry(NamedTuple):
    """A checkpoint's folder, and its manifest; None if the checkpoint is incomplete."""

    name: str
    manifest: Manifest | None


def entries(storage: Storage) -> list[Entry]:
    """List all checkpoints, newest first. Reads manifests only, so their files may still be damaged."""
    steps = (step for name in storage.folders() if (step := step_of(name)) is not None)
    return [entry_of(storage, step) for step in sorted(steps, reverse=True)]


def entry_of(storage: Storage, step: int) -> Entry:
    """Return the checkpoint of a step, with a manifest if it is complete."""
    name = folder_name(step)
    try:
        return Entry(name, parse(storage.read(f"{name}/{FILE_NAME}")))
    except FileNotFoundError:
        return Entry(name, None)


def verify(storage: Storage, entry: Entry) -> str | None:
    """Describe the damage of a checkpoint; None if it is intact. Reads all of its files."""
    if entry.manifest is None:
        return "it has no valid manifest, so it is incomplete or damaged"
    with storage.fetched(entry.name) as folder:
        return find_damage(folder, entry.manifest)


def find_damage(folder: Path, manifest: Manifest) -> str | None:
    """Describe the first difference of a folder's files from a manifest; None if there is none."""
    for file in manifest.files:
        path = folder / file.name
        if not path.is_file():
            return f"{file.name} is missing"
        if (size := path.stat().st_size) != file.size:
            return f"{file.name} has {size} bytes instead of {file.size}"
        if _sha256(path) != file.sha256:
            return f"the checksum of {file.name} has changed since it was written"
    return None


def find_data_change(before: DataDigest, now: DataDigest, *, since: str) -> str | None:
    """Return how the data has changed since a checkpoint, ``since`` names it; None if no difference is found."""
    for name in dict.fromkeys((*before.sizes, *now.sizes)):
        then, there = before.sizes.get(name, 0), now.sizes.get(name, 0)
        if then != there:
            return f"the {name} set has {there} samples, but had {then} when {since} was saved"
    common = [name for name in before.samples if name in now.samples]
    changed = [name for name in common if now.samples[name] != before.samples[name]]
    if not changed:
        return None
    many = f", as have {len(changed)} of the {len(common)} compared samples" if len(changed) > 1 else ""
    first = min(changed, key=lambda name: (len(name), name))
    return f"{first} has changed since {since} was saved{many}"


def best(manifests: Iterable[Manifest], direction: Direction) -> Manifest | None:
    """Return the manifest with the best value of ``checkpoint.best``, the earliest of equals; None without values."""
    rated = [one for one in manifests if one.metric is not None and one.metric == one.metric]  # without NaN
    sign = 1 if direction == "min" else -1
    return min(rated, key=lambda one: (sign * (one.metric or 0.0), one.step), default=None)


def choose_kept(manifests: Iterable[Manifest], *, newest: int, direction: Direction | None) -> set[str]:
    """Return the names of the checkpoints to keep: the newest, and the best if ``direction`` says what is better."""
    ordered = sorted(manifests, key=lambda one: one.step, reverse=True)
    names = {one.name for one in ordered[:newest]}
    if direction and (top := best(ordered, direction)):
        names.add(top.name)
    return names


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

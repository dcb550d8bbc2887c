"""The checkpoints in a storage: listed, verified, and chosen to be kept."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from pipeline.config.values import Direction
from pipeline.training.checkpoints.manifest import FILE_NAME, Manifest, parse, sha256, step_of
from pipeline.training.checkpoints.storage import Storage


class Entry(NamedTuple):
    """A checkpoint's folder, and its manifest; None if the checkpoint is incomplete."""

    name: str
    manifest: Manifest | None


def entries(storage: Storage) -> list[Entry]:
    """List all checkpoints, newest first. Reads manifests only, so their files may still be damaged.

    Raises:
        OSError: the storage can't be read (or the file system's own exception).
    """
    steps = {name: step for name in storage.folders() if (step := step_of(name)) is not None}
    names = sorted(steps, key=steps.__getitem__, reverse=True)
    return [Entry(name, _manifest(storage, name)) for name in names]


def damage(manifest: Manifest, folder: Path) -> str | None:
    """Describe the damage of a checkpoint in a local folder; None if it is intact."""
    for file in manifest.files:
        path = folder / file.name
        if not path.is_file():
            return f"{file.name} is missing"
        if (size := path.stat().st_size) != file.size:
            return f"{file.name} has {size} bytes instead of {file.size}"
        with path.open("rb") as content:
            if sha256(content) != file.sha256:
                return f"the checksum of {file.name} has changed since it was written"
    return None


def verify(storage: Storage, entry: Entry) -> str | None:
    """Describe the damage of a checkpoint in any storage; None if it is intact. Reads all of its files.

    Raises:
        OSError: the storage can't be read (or the file system's own exception).
    """
    if entry.manifest is None:
        return "it has no valid manifest, so it was never completed or is damaged"
    with storage.fetched(entry.name) as folder:
        return damage(entry.manifest, folder)


def best(manifests: Iterable[Manifest], direction: Direction) -> Manifest | None:
    """Return the manifest with the best value of ``checkpoint.best``, the earliest of equals; None without values."""
    rated = [one for one in manifests if one.metric is not None and one.metric == one.metric]  # without NaN
    sign = 1 if direction == "min" else -1
    return min(rated, key=lambda one: (sign * (one.metric or 0.0), one.step), default=None)


def kept(manifests: Iterable[Manifest], *, newest: int, direction: Direction | None) -> set[str]:
    """Return the names of the checkpoints to keep: the newest, and the best if ``direction`` says what is better."""
    ordered = sorted(manifests, key=lambda one: one.step, reverse=True)
    names = {one.name for one in ordered[:newest]}
    top = best(ordered, direction) if direction else None
    return names | ({top.name} if top else set())


def _manifest(storage: Storage, name: str) -> Manifest | None:
    try:
        with storage.open(f"{name}/{FILE_NAME}") as file:
            return parse(file.read())
    except FileNotFoundError:
        return None

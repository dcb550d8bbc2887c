"""Indices of shards kept beside them, because finding each takes a second for every ten thousand files in it."""

import tempfile
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from pipeline.data.shard_index import Index, index_of


def kept_index_of(path: Path, fields: Sequence[str], *, key: str) -> Index:
    """As `index_of`, but found only once, as long as nobody changes the shard and its folder can be written to.

    Raises:
        ExperimentError: as `index_of`.
    """
    place = path.with_name(f"{path.name}.index.npz")
    if (kept := _kept(place, path, fields)) is not None:
        return kept
    index = index_of(path, fields, key=key)
    with suppress(OSError):  # a folder that can't be written to: slower, not wrong
        _keep(index, place, path, fields)
    return index


def _kept(place: Path, path: Path, fields: Sequence[str]) -> Index | None:
    try:
        with np.load(place, allow_pickle=False) as file:
            if file["of"].tolist() == _of(path, fields):
                return Index(file["offsets"], file["sizes"])
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        pass
    return None


def _keep(index: Index, place: Path, path: Path, fields: Sequence[str]) -> None:
    of = np.array(_of(path, fields))
    with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as file:  # several ranks may do it at once
        try:
            np.savez(file, of=of, offsets=index.offsets, sizes=index.sizes)
            Path(file.name).chmod(0o644)
            Path(file.name).replace(place)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def _of(path: Path, fields: Sequence[str]) -> list[str]:
    """What an index belongs to."""
    state = path.stat()
    return [str(state.st_size), str(state.st_mtime_ns), *fields]

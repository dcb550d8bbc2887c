"""Index of a shard: the offset and size of each sample in its tar file, built once and cached beside the shard.

Building it takes a second for every ten thousand files in the shard.
"""

import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.data.shard_files import split_name
from pipeline.errors import ExperimentError


class Index(NamedTuple):
    """Positions of samples in a shard, in bytes."""

    offsets: NDArray[np.int64]
    """Offset of each part of each sample, shape (samples, fields)."""
    sizes: NDArray[np.int64]
    """Size of each part of each sample, shape (samples, fields)."""


class _Part(NamedTuple):
    sample: str
    field: str
    offset: int
    size: int


def index_of(path: Path, fields: Sequence[str], *, key: str) -> Index:
    """Index the given fields of a shard, which may have more.

    Raises:
        ExperimentError: the shard can't be read, or a sample lacks a field.
    """
    try:
        with tarfile.open(path, "r:") as tar:  # uncompressed, so that samples can be read by their offsets
            samples = [_where(dict(parts), name, fields, path) for name, parts in _samples(tar)]
    except tarfile.ReadError as error:
        raise ExperimentError.of(
            key, f"{path} is no plain tar file ({error}); compressed ones must be unpacked"
        ) from error
    except OSError as error:
        raise ExperimentError.of(key, f"can't read {path} ({error.strerror or error}); name another") from error
    both = np.array(samples, dtype=np.int64).reshape(len(samples), len(fields), 2)
    return Index(both[..., 0], both[..., 1])


def _samples(tar: tarfile.TarFile) -> Iterator[tuple[str, list[tuple[str, _Part]]]]:
    """Yield the samples of a shard in order, each the neighboring files of one name."""
    for name, parts in groupby(_parts(tar), key=lambda part: part.sample):
        yield name, [(part.field, part) for part in parts]


def _parts(tar: tarfile.TarFile) -> Iterator[_Part]:
    while (member := tar.next()) is not None:
        tar.members = []  # type: ignore[attr-defined]  # keeps the list of members from growing, as Python's documentation recommends
        sample, field = split_name(member.name)
        if member.isreg() and sample is not None and field is not None:
            yield _Part(sample, field, member.offset_data, member.size)


def _where(parts: dict[str, _Part], name: str, fields: Sequence[str], path: Path) -> list[tuple[int, int]]:
    for field in fields:
        if field.lower() not in parts:
            message = f"{path}: sample {name} has {', '.join(parts)}, but no {field}"
            raise ExperimentError.of("data.fields", f"{message}; name fields that all samples have")
    return [(parts[field.lower()].offset, parts[field.lower()].size) for field in fields]


def cached_index_of(path: Path, fields: Sequence[str], *, key: str) -> Index:
    """Return the index of a shard, cached in a file beside it until the shard changes.

    Raises:
        ExperimentError: as for `index_of`.
    """
    place = path.with_name(f"{path.name}.index.npz")
    if (cached := _cached(place, path, fields)) is not None:
        return cached
    index = index_of(path, fields, key=key)
    with suppress(OSError):  # in a read-only folder it is built each time
        _cache(index, place, path, fields)
    return index


def _cached(place: Path, path: Path, fields: Sequence[str]) -> Index | None:
    try:
        with np.load(place, allow_pickle=False) as file:
            if file["of"].tolist() == _state(path, fields):
                return Index(file["offsets"], file["sizes"])
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        pass
    return None


def _cache(index: Index, place: Path, path: Path, fields: Sequence[str]) -> None:
    state = np.array(_state(path, fields))
    with tempfile.NamedTemporaryFile(
        dir=place.parent, delete=False
    ) as file:  # renamed when complete, since several ranks may write it at once
        try:
            np.savez(file, of=state, offsets=index.offsets, sizes=index.sizes)
            Path(file.name).chmod(0o644)
            Path(file.name).replace(place)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def _state(path: Path, fields: Sequence[str]) -> list[str]:
    """Return the state of a shard that its index is valid for."""
    stat = path.stat()
    return [str(stat.st_size), str(stat.st_mtime_ns), *fields]

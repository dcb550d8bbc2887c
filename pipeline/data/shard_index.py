"""Where each sample of a shard lies: found once, by going from header to header through the tar file."""

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
    """Bytes in a shard."""

    offsets: NDArray[np.int64]
    """Where each part of each sample begins, shape (samples, fields)."""
    sizes: NDArray[np.int64]
    """Bytes of each, shape (samples, fields)."""


class _Part(NamedTuple):
    sample: str
    field: str
    offset: int
    size: int


def index_of(path: Path, fields: Sequence[str], *, key: str) -> Index:
    """Index a shard by the fields that are asked for; others may be there.

    Raises:
        ExperimentError: it can't be read, or a sample lacks a field.
    """
    try:
        with tarfile.open(path, "r:") as tar:  # not compressed: else nothing could be read from its middle
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
    """The samples of a shard in order: neighbouring files of one name."""
    for name, parts in groupby(_parts(tar), key=lambda part: part.sample):
        yield name, [(part.field, part) for part in parts]


def _parts(tar: tarfile.TarFile) -> Iterator[_Part]:
    while (member := tar.next()) is not None:
        tar.members = []  # type: ignore[attr-defined]  # as Python's documentation says, to keep none of them
        sample, field = split_name(member.name)
        if member.isreg() and sample is not None and field is not None:
            yield _Part(sample, field, member.offset_data, member.size)


def _where(parts: dict[str, _Part], name: str, fields: Sequence[str], path: Path) -> list[tuple[int, int]]:
    for field in fields:
        if field.lower() not in parts:
            message = f"{path}: sample {name} has {', '.join(parts)}, but no {field}"
            raise ExperimentError.of("data.fields", f"{message}; name fields that all samples have")
    return [(parts[field.lower()].offset, parts[field.lower()].size) for field in fields]


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

"""Files of shards in WebDataset's format: brace patterns, sample names and decoding are taken from its library.

The index of a shard, the offset and size of each sample in its tar file, is built once and cached beside the shard:
building it takes a second for every ten thousand files in the shard.
"""

import importlib
import re
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.config.extras import install_command
from pipeline.errors import ExperimentError

Decode = Callable[[bytes], Any]
_UNPICKLED = ("pkl", "pickle", "pyd", "pth")


def decoders(fields: Sequence[str], *, key: str) -> tuple[Decode, ...]:
    """Return the decoder of each field.

    Raises:
        ExperimentError: there are no fields, webdataset is not installed, or can't decode one.
    """
    if not fields or isinstance(fields, str):
        raise ExperimentError.of(key, f"is {fields!r}; write the endings of a sample's files, e.g. [jpg, cls]")
    autodecode = _library(key).autodecode
    known = sorted({*autodecode.decoders, *autodecode.IMAGE_EXTENSIONS} - {*_UNPICKLED})
    for field in fields:
        ending = _last(field)
        if ending in _UNPICKLED:
            raise ExperimentError.of(key, f"decoding {field} may run any code; store npy, json, txt or images")
        if ending not in known:
            raise ExperimentError.of(key, f"{field} can't be decoded; known endings are {', '.join(known)}")
    return tuple(partial(_decoded, field) for field in fields)


def expanded(patterns: Sequence[str], *, key: str) -> list[Path]:
    """Expand patterns such as train-{000000..000099}.tar.

    Raises:
        ExperimentError: the patterns name no file.
    """
    names = [name for pattern in patterns for name in _library(key).shardlists.expand_urls(pattern)]
    if not names:
        raise ExperimentError.of(key, "names no file; write e.g. data/train-{000000..000099}.tar")
    return [Path(name) for name in names]


def _decoded(field: str, content: bytes) -> Any:
    from webdataset.autodecode import basichandlers, imagehandler

    if (value := basichandlers(_last(field), content)) is not None:
        return value
    image: torch.Tensor = imagehandler("torchrgb")(_last(field), content)
    return image


def _last(field: str) -> str:
    """Return the last ending of a field, which decides its decoder: png for seg.png."""
    return re.sub(r".*[.]", "", field).lower()


def _library(key: str) -> ModuleType:
    try:
        library = importlib.import_module("webdataset")  # imported here since it takes half a second
    except ModuleNotFoundError as error:
        if error.name != "webdataset":
            raise
        message = f"shards need webdataset, which is not installed: {install_command('webdataset')}"
        raise ExperimentError.of(key.partition(".")[0], message) from None
    return library


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
            samples = [
                _where({part.field: part for part in parts}, name, fields, path)
                for name, parts in groupby(_parts(tar), key=lambda part: part.sample)  # neighboring files of one name
            ]
    except tarfile.ReadError as error:
        raise ExperimentError.of(
            key, f"{path} is no plain tar file ({error}); compressed ones must be unpacked"
        ) from error
    except OSError as error:
        raise ExperimentError.of(key, f"can't read {path} ({error.strerror or error}); name another") from error
    both = np.array(samples, dtype=np.int64).reshape(len(samples), len(fields), 2)
    return Index(both[..., 0], both[..., 1])


def _parts(tar: tarfile.TarFile) -> Iterator[_Part]:
    from webdataset.tariterators import base_plus_ext

    while (member := tar.next()) is not None:
        tar.members = []  # type: ignore[attr-defined]  # keeps the list of members from growing, as Python's documentation recommends
        sample, field = base_plus_ext(member.name)  # None for other files than those of samples
        if member.isreg() and sample is not None and field is not None:
            yield _Part(sample, field.lower(), member.offset_data, member.size)


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

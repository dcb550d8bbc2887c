"""WebDataset's conventions, taken from its library: brace patterns of shards, sample names, decoding."""

import importlib
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

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


def split_name(name: str) -> tuple[str | None, str | None]:
    """Return the sample and the field of a file in a shard; None for other files."""
    from webdataset.tariterators import base_plus_ext

    base, field = base_plus_ext(name)
    return base, field and field.lower()


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
        message = "shards need webdataset, which is not installed: pip install 'ddp-pipeline[shards]'"
        raise ExperimentError.of(key.partition(".")[0], message) from None
    return library

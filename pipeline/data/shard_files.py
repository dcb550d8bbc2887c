"""What WebDataset's library knows of its format: names of many shards in one, names of samples, decoding."""

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
    """How to decode each field.

    Raises:
        ExperimentError: there are none, webdataset is not installed, or doesn't know an ending.
    """
    if not fields or isinstance(fields, str):
        raise ExperimentError.of(key, f"is {fields!r}; write the endings of a sample's files, e.g. [jpg, cls]")
    autodecode = _library(key).autodecode
    known = sorted({*autodecode.decoders, *autodecode.IMAGE_EXTENSIONS} - {*_UNPICKLED})
    for field in fields:
        ending = _last(field)
        if ending in _UNPICKLED:
            raise ExperimentError.of(key, f"{field} may run any code when it is read; store npy, json, txt or images")
        if ending not in known:
            raise ExperimentError.of(key, f"{field} can't be decoded; known endings are {', '.join(known)}")
    return tuple(partial(_decoded, field) for field in fields)


def expanded(patterns: Sequence[str], *, key: str) -> list[Path]:
    """The files that patterns such as train-{000000..000099}.tar stand for.

    Raises:
        ExperimentError: there are none.
    """
    names = [name for pattern in patterns for name in _library(key).shardlists.expand_urls(pattern)]
    if not names:
        raise ExperimentError.of(key, "names no file; write e.g. data/train-{000000..000099}.tar")
    return [Path(name) for name in names]


def split_name(name: str) -> tuple[str | None, str | None]:
    """The sample that a file belongs to, and its field; None for other files."""
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
    """A field such as seg.png is decoded as png."""
    return re.sub(r".*[.]", "", field).lower()


def _library(key: str) -> ModuleType:
    try:
        library = importlib.import_module("webdataset")  # half a second, which users of other data needn't wait for
    except ModuleNotFoundError as error:
        if error.name != "webdataset":
            raise
        message = "shards need webdataset, which is not installed: pip install 'ddp-pipeline[shards]'"
        raise ExperimentError.of(key.partition(".")[0], message) from None
    return library

"""Files of a state: safetensors and JSON, so that loading never executes code.

Unsharded tensors are written by rank 0 into a single file; sharded ones by each rank into its own, with
torch.distributed.checkpoint, whose reader reads both layouts at any world size.
"""

import json
import math
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from pipeline.training.checkpoints.manifest import VALUES, StoredFile, sha256
from pipeline.training.checkpoints.state import State, empty_like, is_sharded
from pipeline.training.context import TrainContext

_TENSORS = "state.safetensors"
_FLOAT = "$float"


def write_unsharded(state: State, folder: Path) -> tuple[StoredFile, ...]:
    """Write a complete, unsharded state and return its files.

    Raises:
        OSError: the disk is full or gone (or safetensors' own error for that).
    """
    save_file({name: tensor.contiguous() for name, tensor in state.tensors.items()}, folder / _TENSORS)
    _sync(folder / _TENSORS)
    _write_values(state, folder)
    return _listed(folder, [_TENSORS, VALUES])


def write_shards(state: State, folder: Path, *, group: dist.ProcessGroup) -> tuple[StoredFile, ...]:
    """Write this rank's shard of a state and return its files. Collective.

    Raises:
        OSError: a rank couldn't write; raised on all ranks.
    """
    # These imports take more than a second, and only sharded strategies need them.
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        save(dict(state.tensors), storage_writer=writer, process_group=group)
    except CheckpointException as error:  # a BaseException
        raise OSError(str(error)) from error
    rank = dist.get_rank(group)
    names = [path.name for path in folder.glob(f"shard-{rank + 1:05d}-*")]
    if rank == 0:
        _write_values(state, folder)
        names.append(VALUES)
    return _listed(folder, names)


def _write_values(state: State, folder: Path) -> None:
    (folder / VALUES).write_text(json.dumps(_with_floats_as_text(state.values), allow_nan=False), encoding="utf-8")
    _sync(folder / VALUES)


def read(context: TrainContext, folder: Path) -> State:
    """Read the state in a folder; of a sharded model this rank's shard only. Collective for a sharded model."""
    values = json.loads((folder / VALUES).read_text(encoding="utf-8"), object_hook=_with_floats)
    if (folder / _TENSORS).exists() and not is_sharded(context):
        with safe_open(folder / _TENSORS, framework="pt") as file:
            return State({name: file.get_tensor(name) for name in file.keys()}, values)  # noqa: SIM118 (no mapping)
    return _read_shards(context, folder, values)


def _read_shards(context: TrainContext, folder: Path, values: object) -> State:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    described = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    shapes = {
        name: (meta.size, meta.properties.dtype)
        for name, meta in described.items()
        if isinstance(meta, TensorStorageMetadata)
    }
    tensors = empty_like(context, shapes)
    with warnings.catch_warnings():  # loading in a single process is intended
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=not is_sharded(context))
    return State(tensors, values)


def _with_floats_as_text(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by mappings that `_with_floats` reads."""
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: repr(float(value))}
    if isinstance(value, Mapping):
        return {key: _with_floats_as_text(item) for key, item in value.items()}
    return [_with_floats_as_text(item) for item in value] if isinstance(value, list | tuple) else value


def _with_floats(value: dict[str, Any]) -> Any:
    return float(value[_FLOAT]) if value.keys() == {_FLOAT} else value


def _listed(folder: Path, names: list[str]) -> tuple[StoredFile, ...]:
    return tuple(_described(folder / name) for name in names)


def _described(path: Path) -> StoredFile:
    with path.open("rb") as file:
        return StoredFile(name=path.name, size=path.stat().st_size, sha256=sha256(file))


def _sync(path: Path) -> None:
    """Flush a file from the system's cache to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())

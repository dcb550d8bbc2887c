"""Dataset of tar files in WebDataset's format: a sample is all files of one name with different endings."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset
from typing_extensions import override

from pipeline.data.shard_files import Decode, Index, cached_index_of, decoders, expanded
from pipeline.data.splits import Splits

Files = str | list[str]
Transform = Callable[[Any], Any]


def shards(
    *, train: Files, validation: Files | None = None, fields: Sequence[str], transform: Transform | None = None
) -> Splits:
    """Return samples with one part for each of ``fields``, in that order, decoded as by WebDataset.

    Images are float32 of shape (3, height, width) in [0, 1], npy are arrays, cls and the like are int, txt is str, json
    is its contents. Only an index of the shards is in memory; a sample is read by its offset, in any order.

    Args:
        train: uncompressed tar files: "data/train-{000000..000099}.tar", or a list of such patterns.
        validation: tar files of the validation set; None: no validation.
        fields: endings of the files that make up a sample, e.g. [jpg, cls].
        transform: called with the first part of each sample, the input; may be random.

    Raises:
        ExperimentError: webdataset is not installed, or a field can't be decoded, or a shard can't be read or lacks it.
    """
    decode = decoders(fields, key="data.fields")

    def samples(files: Files, key: str) -> Dataset[tuple[Any, ...]]:
        paths = expanded([files] if isinstance(files, str) else files, key=key)
        return _Samples(paths, [cached_index_of(path, fields, key=key) for path in paths], decode, transform)

    train_set = samples(train, "data.train")
    return Splits(train_set, samples(validation, "data.validation") if validation else None)


class _Samples(Dataset[tuple[Any, ...]]):
    def __init__(
        self, paths: list[Path], indices: list[Index], decode: tuple[Decode, ...], transform: Transform | None
    ) -> None:
        self._paths = paths
        self._ends: NDArray[np.int64] = np.cumsum([len(index.offsets) for index in indices])
        self._offsets = np.concatenate([index.offsets for index in indices])
        self._sizes = np.concatenate([index.sizes for index in indices])
        self._decode = decode
        self._transform = transform

    def __len__(self) -> int:
        return len(self._offsets)

    @override
    def __getitem__(self, index: int) -> tuple[Any, ...]:
        path = self._paths[int(np.searchsorted(self._ends, index, side="right"))]
        try:
            parts = self._parts(path, index)
        except Exception as error:
            raise ValueError(f"{path}: {type(error).__name__}: {error}") from error
        return parts if self._transform is None else (self._transform(parts[0]), *parts[1:])

    def _parts(self, path: Path, index: int) -> tuple[Any, ...]:
        # Opened for each sample: open files would be one descriptor per shard, with offsets shared by loader processes.
        with path.open("rb", buffering=0) as file:
            contents = [_read(file, *where) for where in zip(self._offsets[index], self._sizes[index], strict=True)]
        return tuple(decode(content) for decode, content in zip(self._decode, contents, strict=True))


def _read(file: Any, offset: int, size: int) -> bytes:
    file.seek(int(offset))
    content = file.read(int(size))
    if len(content) != size:
        raise EOFError(f"the shard has fewer than {offset + size} bytes; has it changed since training began?")
    return bytes(content)

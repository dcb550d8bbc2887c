"""CIFAR-10 (Krizhevsky 2009, "Learning Multiple Layers of Features from Tiny Images"), binary version, with download.

A record is one byte of label and 3072 bytes of image: 1024 red, 1024 green, 1024 blue, each row by row.
"""

import hashlib
import tarfile
from collections.abc import Iterable
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset
from typing_extensions import override

from pipeline.data.make_once import make_once
from pipeline.data.splits import Splits
from pipeline.errors import ExperimentError
from pipeline.protocol.progress import ProgressReporter

_IMAGE_SHAPE = (3, 32, 32)
_RECORD_BYTES = 1 + 3 * 32 * 32
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
"""Names of the labels."""

_MEAN = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)  # of the training set's red, green, blue
_DEVIATION = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)
_PADDING = 4
ADDRESS = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
FOLDER = "cifar-10-batches-bin"
"""Folder name in the archive."""

_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"  # as the dataset's home page states it
_STALL_SECONDS = 60.0
_CHUNK_BYTES = 2**16


def cifar10(*, directory: str = ".data", download: bool = True, augment: bool = True) -> Splits:
    """Return 50 000 training and 10 000 validation pairs of (image, label), standardized by channel.

    Images are float32 of shape (3, 32, 32), labels int64.

    Args:
        directory: folder that holds cifar-10-batches-bin, or gets it.
        download: fetch the official archive (170 MB) when the folder is missing.
        augment: random crops after padding by 4, and random flips, of the training images (He et al. 2015, arXiv
            1512.03385, section 4.2), drawn from torch's global random generator.

    Raises:
        ExperimentError: the files are missing and can't be fetched, or aren't the binary version.
    """
    folder = Path(directory) / FOLDER
    if not folder.is_dir():
        if not download:
            raise ExperimentError.of("data", f"{folder} is missing, and download is false; {how_to_get(folder)}")
        download_to(folder)
    train = _read(folder / f"data_batch_{number}.bin" for number in range(1, 6))
    validation = _read([folder / "test_batch.bin"])
    return Splits(_Images(*train, augment=augment), _Images(*validation, augment=False))


class _Images(Dataset[tuple[Tensor, ...]]):
    """Dataset that stores bytes, a quarter of the size, and converts each sample to floats when it is read."""

    def __init__(self, images: Tensor, labels: Tensor, *, augment: bool) -> None:
        self._images = images
        self._labels = labels
        self._augment = augment

    def __len__(self) -> int:
        return len(self._labels)

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = standardize(self._images[index])
        return (_random_crop_and_flip(image) if self._augment else image), self._labels[index]


def standardize(pixels: Tensor) -> Tensor:
    """Scale bytes of shape (..., 3, height, width) to mean 0 and deviation 1 of each channel of the training set."""
    return (pixels / 255 - _MEAN) / _DEVIATION


def _random_crop_and_flip(image: Tensor) -> Tensor:
    """Crop and flip at random; the padding of zeros is the mean color of a standardized image."""
    top, left = torch.randint(2 * _PADDING + 1, (2,)).tolist()
    padded = functional.pad(image, (_PADDING,) * 4)
    cropped = padded[:, top : top + image.shape[1], left : left + image.shape[2]]
    return cropped.flip(-1) if torch.rand(()) < 0.5 else cropped


def _read(paths: Iterable[Path]) -> tuple[Tensor, Tensor]:
    """Read images of shape (samples, 3, 32, 32) as bytes, and labels of shape (samples,)."""
    records = torch.cat([_records(path) for path in paths])
    return records[:, 1:].reshape(-1, *_IMAGE_SHAPE), records[:, 0].to(torch.int64)


def _records(path: Path) -> Tensor:
    try:
        content = torch.from_numpy(np.fromfile(path, dtype=np.uint8))
    except OSError as error:
        raise ExperimentError.of("data", f"can't read {path} ({error.strerror}); {how_to_get(path.parent)}") from error
    if not len(content) or len(content) % _RECORD_BYTES:
        message = f"{path} holds {len(content)} bytes, expected a multiple of {_RECORD_BYTES}"
        raise ExperimentError.of("data", f"{message}; remove the folder and {how_to_get(path.parent)}")
    records = content.view(-1, _RECORD_BYTES)
    if (label := int(records[:, 0].max())) >= len(CLASSES):
        message = f"{path} holds label {label}, expected 0 to 9 (CIFAR-10, binary version)"
        raise ExperimentError.of("data", f"{message}; remove the folder and {how_to_get(path.parent)}")
    return records


def how_to_get(folder: Path) -> str:
    """Return the manual way to get ``folder``, for the end of an error message."""
    return f"fetch {ADDRESS} and unpack it in {folder.parent.absolute()}, which makes {folder.name}"


def download_to(folder: Path) -> None:
    """Download and unpack CIFAR-10 to ``folder`` atomically, once per machine, however many ranks call this.

    Raises:
        ExperimentError: the network or the file system fails, or the archive is not the official one.
    """
    try:
        make_once(folder, _fetch_and_unpack, what="it from a download of CIFAR-10 (170 MB)")
    except (OSError, HTTPException, tarfile.TarError) as error:
        raise ExperimentError.of("data", f"CIFAR-10 can't be downloaded ({error}); {how_to_get(folder)}") from error


def _fetch_and_unpack(folder: Path) -> None:
    """Download the archive and unpack it, which makes ``folder``: the archive's folder has the same name."""
    archive = folder.with_name("archive.tar.gz")
    _fetch(archive)
    _check(archive)
    with tarfile.open(archive) as tar:
        tar.extractall(folder.parent, filter="data")


def _fetch(archive: Path) -> None:
    with (
        urlopen(ADDRESS, timeout=_STALL_SECONDS) as response,
        archive.open("wb") as file,
        ProgressReporter("downloading CIFAR-10", total=response.length, unit="B") as progress,
    ):
        while chunk := response.read(_CHUNK_BYTES):
            file.write(chunk)
            progress.by(len(chunk))


def _check(archive: Path) -> None:
    with archive.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if digest != _MD5:
        raise OSError(f"the downloaded file has MD5 {digest}, expected {_MD5}")

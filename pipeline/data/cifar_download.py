"""Fetches CIFAR-10 once for each machine, however many ranks ask for it at the same time."""

import hashlib
import tarfile
import tempfile
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

from filelock import FileLock

from pipeline.errors import ExperimentError
from pipeline.protocol.progress import ProgressReporter

ADDRESS = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
FOLDER = "cifar-10-batches-bin"
"""Folder in the archive."""

_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"  # as the dataset's home page states it
_STALL_SECONDS = 60.0
_CHUNK_BYTES = 2**16


def how_to_get(folder: Path) -> str:
    """What to do by hand to have ``folder``; the end of an error message."""
    return f"fetch {ADDRESS} and unpack it in {folder.parent.absolute()}, which makes {folder.name}"


def download_to(folder: Path) -> None:
    """Make ``folder`` appear, complete or not at all.

    Raises:
        ExperimentError: the network or the file system refuses, or the archive is not the official one.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):  # of several ranks one fetches, the others wait for it
            if not folder.is_dir():
                _fetch_and_unpack(folder)
    except (OSError, HTTPException, tarfile.TarError) as error:
        raise ExperimentError.of("data", f"CIFAR-10 can't be downloaded ({error}); {how_to_get(folder)}") from error


def _fetch_and_unpack(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:  # same file system, so that renaming is atomic
        temporary = Path(name)
        archive = temporary / "archive.tar.gz"
        _fetch(archive)
        _check(archive)
        with tarfile.open(archive) as tar:
            tar.extractall(temporary, filter="data")
        (temporary / FOLDER).rename(folder)


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
        raise OSError(f"what arrived has MD5 {digest}, expected {_MD5}")

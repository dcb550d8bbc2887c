"""Storage of checkpoints: a folder, or any address that fsspec knows (s3://bucket/x, gs://..., memory://...)."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import BinaryIO, cast

import fsspec
from fsspec.callbacks import Callback
from fsspec.implementations.local import LocalFileSystem

from pipeline.errors import ExperimentError, TrainingError
from pipeline.experiment.uris import has_password, without_credentials
from pipeline.protocol.progress import ProgressReporter

_KEY = "checkpoint.directory"


def address_of(directory: str | None, *, run: Path) -> str:
    """Return the address of a run's checkpoints.

    Args:
        directory: ``checkpoint.directory``; None for a folder inside the run's folder.
        run: the run's folder, named by the run's id.
    """
    if directory is None:
        return str(run.resolve() / "checkpoints")
    if "://" in directory:
        return f"{directory.rstrip('/')}/{run.name}"
    return str(Path(directory).expanduser().resolve() / run.name)


class Storage:
    """Checkpoints at one address, each in a folder; all names are relative to the address.

    Errors of the storage itself are raised as the file system's own exceptions.
    """

    def __init__(self, address: str) -> None:
        """Parse an address, without creating or contacting anything.

        Raises:
            ExperimentError: the protocol is unknown, its package isn't installed, or the address holds a password.
        """
        self.address = address
        if has_password(address):
            raise ExperimentError.of(
                _KEY,
                f"{without_credentials(address)} has a password, which would be recorded with the run. Set the "
                "password in the environment, e.g. AWS_SECRET_ACCESS_KEY.",
            )
        try:
            self._fs, self._root = fsspec.core.url_to_fs(address)
        except ImportError as error:
            raise ExperimentError.of(_KEY, f"{address} needs a package: {error} (on every node)") from error
        except ValueError as error:
            raise ExperimentError.of(
                _KEY, f"{address}: {error}. Use a folder, or an address such as s3://bucket/folder."
            ) from error
        self.is_local = isinstance(self._fs, LocalFileSystem)

    def place(self, name: str) -> str:
        """Return the address of a file or folder."""
        return f"{self.address.rstrip('/')}/{name}"

    def folders(self) -> list[str]:
        """List the names of all folders."""
        self._fs.invalidate_cache()  # other processes write here, too
        try:
            entries = self._fs.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        return [entry["name"].rstrip("/").rsplit("/", 1)[-1] for entry in entries if entry["type"] == "directory"]

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading."""
        return cast(BinaryIO, self._fs.open(self._path(name), "rb"))

    def write(self, name: str, content: bytes) -> None:
        """Write a small file atomically."""
        if not self.is_local:
            self._fs.pipe_file(self._path(name), content)  # a single object, visible once it is complete
            return
        path = Path(self._path(name))
        partial = path.with_name(f".{path.name}.partial")
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        _sync(path.parent)

    def remove(self, name: str) -> None:
        """Remove a file or a folder, if it exists."""
        with suppress(FileNotFoundError):
            self._fs.rm(self._path(name), recursive=True)

    @contextmanager
    def staging(self, folder: str, *, size: int = 0) -> Iterator[Path]:
        """Provide a local folder for ``size`` bytes, whose files are stored in ``folder`` after the block.

        Raises:
            TrainingError: the file system of the temporary folder has less free space.
        """
        if self.is_local:
            path = Path(self._path(folder))
            path.mkdir(parents=True, exist_ok=True)
            yield path
            _sync(path)
            _sync(path.parent)
            return
        check_free_space(folder, size=size)
        with TemporaryDirectory(prefix="checkpoint-") as temporary:
            yield Path(temporary)
            files = sorted(Path(temporary).iterdir())
            sizes = [file.stat().st_size for file in files]
            with ProgressReporter(f"uploading {folder}", total=sum(sizes), unit="B") as progress:
                for file, size in zip(files, sizes, strict=True):
                    with _File(progress, size) as told:
                        self._fs.put_file(str(file), self._path(f"{folder}/{file.name}"), callback=told)

    @contextmanager
    def fetched(self, folder: str) -> Iterator[Path]:
        """Provide a local, read-only copy of ``folder``; the folder itself if the storage is local.

        Raises:
            TrainingError: the file system of the temporary folder has too little free space.
        """
        if self.is_local:
            yield Path(self._path(folder))
            return
        sizes = {path: entry["size"] for path, entry in self._fs.find(self._path(folder), detail=True).items()}
        total = sum(sizes.values())
        check_free_space(folder, size=total)
        with TemporaryDirectory(prefix="checkpoint-") as temporary:
            with ProgressReporter(f"downloading {folder}", total=total, unit="B") as progress:
                for path, size in sizes.items():
                    with _File(progress, size) as told:
                        self._fs.get_file(path, str(Path(temporary) / path.rsplit("/", 1)[-1]), callback=told)
            yield Path(temporary)

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"


class _File(Callback):  # type: ignore[misc] # fsspec has no types
    """Transfer progress of one file among several; some file systems report nothing until it ends."""

    def __init__(self, progress: ProgressReporter, size: int) -> None:
        super().__init__()
        self._progress, self._before, self._end = progress, progress.done, progress.done + size

    def call(self, *_: object, **__: object) -> None:
        self._progress.to(self._before + self.value)

    def close(self) -> None:
        self._progress.to(self._end)


def check_free_space(checkpoint: str, *, size: int) -> None:
    """Check that the temporary folder has room for ``size`` bytes.

    Raises:
        TrainingError: its file system has less free space.
    """
    folder = gettempdir()
    if (free := shutil.disk_usage(folder).free) < size:
        raise TrainingError(
            f"the temporary folder {folder} has {free / 2**20:,.1f} MiB free, but {checkpoint} needs "
            f"{size / 2**20:,.1f} MiB. Set TMPDIR to a folder with more space on every node."
        )


def _sync(folder: Path) -> None:
    """Make the names in a folder survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

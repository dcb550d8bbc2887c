"""Storage of checkpoints: a folder, or any address that fsspec knows (s3://bucket/x, gs://..., memory://...)."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import fsspec
from fsspec.implementations.local import LocalFileSystem

from pipeline.errors import ExperimentError
from pipeline.experiment.uris import has_password, without_credentials

_KEY = "checkpoint.directory"


def address_of(directory: str | None, *, run: Path) -> str:
    """Return the address of the checkpoints of a run, whose folder has its id, by ``checkpoint.directory``."""
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
        """Parse an address, without creating or contacting anything, or raise ExperimentError."""
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

    def read(self, name: str) -> bytes:
        """Read a small file."""
        with self._fs.open(self._path(name), "rb") as file:
            return bytes(file.read())

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
    def staging(self, folder: str) -> Iterator[Path]:
        """Provide a local folder whose files are stored in ``folder`` after the block."""
        if self.is_local:
            path = Path(self._path(folder))
            path.mkdir(parents=True, exist_ok=True)
            yield path
            _sync(path)
            _sync(path.parent)
            return
        with TemporaryDirectory(prefix="checkpoint-") as temporary:
            yield Path(temporary)
            for file in sorted(Path(temporary).iterdir()):
                self._fs.put_file(str(file), self._path(f"{folder}/{file.name}"))

    @contextmanager
    def fetched(self, folder: str) -> Iterator[Path]:
        """Provide a local, read-only copy of ``folder``; the folder itself if the storage is local."""
        if self.is_local:
            yield Path(self._path(folder))
            return
        with TemporaryDirectory(prefix="checkpoint-") as temporary:
            for path in self._fs.find(self._path(folder)):
                self._fs.get_file(path, str(Path(temporary) / path.rsplit("/", 1)[-1]))
            yield Path(temporary)

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"


def _sync(folder: Path) -> None:
    """Make the names in a folder survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

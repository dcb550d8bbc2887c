"""MLflow's SQLite store: checking that the file is usable, and creating it atomically."""

import os
import sqlite3
import tempfile
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

from pipeline.errors import ResourceError
from pipeline.experiment.uris import SQLITE
from pipeline.system.lock_file import LockFile

_COMPANIONS = ("-journal", "-wal", "-shm")
"""Suffixes of the files that SQLite keeps beside an open database, or after its writer was killed."""
_PATIENCE_S = 60.0  # creating takes two seconds, on a busy machine many times that


def create(path: Path, *, artifacts: str) -> None:
    """Create MLflow's store unless it exists: under another name, then renamed, so that a kill leaves no half of it.

    Several processes may call this at the same time.

    Args:
        path: file of the store.
        artifacts: URI of the folder for artifacts.

    Raises:
        TimeoutError: another process has been creating it for a minute.
        Exception: whatever MLflow raises.
    """
    place = path.resolve()  # a symbolic link is kept
    if _has_content(place):
        return
    lock, draft = (place.with_name(f"{place.name}.{suffix}") for suffix in ("lock", "partial"))
    with LockFile(lock, patience_s=_PATIENCE_S):
        if not _has_content(place):
            _remove(draft, *_companions(draft))  # left by a creation that was killed
            _write(draft, artifacts=artifacts)
        place.touch()  # NFS may remember that there was no such file; this asks the file server
        if _has_content(place):
            _remove(draft)
        else:
            # Left by a store that was moved away: SQLite would read them as the new store's.
            _remove(*_companions(place))
            draft.replace(place)


def check(path: Path) -> None:
    """Check that MLflow can keep runs in the file, which needn't exist yet. Creates nothing.

    Raises:
        ResourceError: the file is no usable store.
        OSError: the path can't be accessed.
    """
    folder = path.parent
    if not folder.is_dir():
        raise ResourceError(
            f"tracking.uri: the folder {folder} of {path.name} doesn't exist. Create it: mkdir -p {folder}"
        )
    try:  # os.access isn't enough: root has permission even on a read-only file system
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ResourceError(
            f"tracking.uri: can't write to {folder}, the folder of {path.name} ({error.strerror}). "
            "Change its permissions, or set tracking.uri to a file elsewhere."
        ) from error
    if path.is_dir():
        raise ResourceError(f"tracking.uri: {path} is a folder. Name a file in it: sqlite:///{path}/mlflow.db")
    if path.exists():
        _check_database(path)


def _check_database(path: Path) -> None:
    wrong = "" if os.access(path, os.W_OK) else "no permission to write"
    is_unfinished = False
    try:
        # Not read-only: SQLite rolls back what a killed process has left half-written.
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True)) as database:
            is_unfinished = _is_unfinished(database)
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:  # busy: another process is writing
            wrong = wrong or str(error)
    if wrong:
        raise ResourceError(
            f"tracking.uri: {path} can't be used ({wrong}). Change its permissions, "
            "or move it away: the next run creates a new file."
        )
    if is_unfinished:
        raise ResourceError(
            f"tracking.uri: {path} holds no runs, because its creation was interrupted. "
            f"Move it away, and the next run creates a new file: mv {path} {path}.unfinished"
        )


def _is_unfinished(database: sqlite3.Connection) -> bool:
    """Return True if creating the tables was never completed: MLflow adds the first experiment last."""
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if "alembic_version" not in tables or "experiments" not in tables:
        return False  # empty, or not MLflow's
    if database.execute("SELECT count(*) FROM experiments").fetchone()[0]:
        return False
    revisions = {revision for (revision,) in database.execute("SELECT version_num FROM alembic_version")}
    return revisions != _newest_revisions()


def _newest_revisions() -> set[str]:
    """Return the schema revisions of the installed MLflow."""
    from alembic.script import ScriptDirectory

    mlflow = find_spec("mlflow")
    assert mlflow is not None
    assert mlflow.origin is not None
    return set(ScriptDirectory(str(Path(mlflow.origin).parent / "store" / "db_migrations")).get_heads())


def _write(path: Path, *, artifacts: str) -> None:
    """Have MLflow create a store in a single file."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    SqlAlchemyStore(f"{SQLITE}{path}", artifacts).engine.dispose()
    with closing(sqlite3.connect(path)) as database:  # the last connection leaves no other file
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _has_content(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _companions(path: Path) -> tuple[Path, ...]:
    return tuple(path.with_name(f"{path.name}{suffix}") for suffix in _COMPANIONS)


def _remove(*paths: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)

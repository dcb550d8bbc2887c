"""The SQLite file in which MLflow keeps runs: whether it can be used, and its creation, whole or not at all."""

import os
import sqlite3
import tempfile
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

from pipeline.config.uris import SQLITE
from pipeline.errors import ResourceError

_COMPANIONS = ("-journal", "-wal", "-shm")
"""What SQLite keeps beside a database that is open, or whose writer was killed."""
_PATIENCE_S = 60.0  # creating takes about two seconds, on a busy machine many times that


def create(path: Path, *, artifacts: str) -> None:
    """Create MLflow's store unless it is there: beside its place, then renamed, so that a kill leaves nothing of it.

    Several processes may call this at the same time.

    Args:
        path: of the store.
        artifacts: URI of the folder for artifacts.

    Raises:
        TimeoutError: another process has been creating it for a minute.
        Exception: whatever MLflow raises.
    """
    from filelock import FileLock

    place = path.resolve()  # a link stays one
    if _has_content(place):
        return
    lock, draft = (place.with_name(f"{place.name}.{suffix}") for suffix in ("lock", "partial"))
    with FileLock(lock, timeout=_PATIENCE_S):
        if not _has_content(place):
            _remove(draft, *_companions(draft))  # of a creation that was killed
            _write(draft, artifacts=artifacts)
            _remove(*_companions(place))  # of a store that was moved away: SQLite would take them for the new one's
            draft.replace(place)
        _remove(lock)  # nobody needs it any more: whoever waits finds the store there


def check(path: Path) -> None:
    """Find out whether MLflow can keep runs in the file, which needn't be there yet. Creates nothing.

    Raises:
        ResourceError: it can't.
        OSError: the path can't be looked at.
    """
    folder = path.parent
    if not folder.is_dir():
        raise ResourceError(
            f"tracking.uri: the folder {folder} of {path.name} doesn't exist; create it: mkdir -p {folder}"
        )
    try:  # asking for permission isn't enough: root has it on a read-only or virtual file system, too
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ResourceError(
            f"tracking.uri: no file can be written in {folder}, where {path.name} belongs ({error.strerror}); "
            "change its permissions, or set tracking.uri to a file elsewhere"
        ) from error
    if path.is_dir():
        raise ResourceError(f"tracking.uri: {path} is a folder; name a file in it: sqlite:///{path}/mlflow.db")
    if path.exists():
        _check_database(path)


def _check_database(path: Path) -> None:
    wrong = "" if os.access(path, os.W_OK) else "no permission to write"
    is_unfinished = False
    try:
        # Not read-only: what a killed process has left half-written is undone by whoever opens it next.
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True)) as database:
            is_unfinished = _is_unfinished(database)
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:  # busy: someone writes right now, our turn comes
            wrong = wrong or str(error)
    if wrong:
        raise ResourceError(
            f"tracking.uri: {path} can't be used ({wrong}); change its permissions, "
            "or move it away and a new one will be created"
        )
    if is_unfinished:
        raise ResourceError(
            f"tracking.uri: {path} was never completed, its creation was cut short; it holds no runs; "
            f"move it away and a new one will be created: mv {path} {path}.unfinished"
        )


def _is_unfinished(database: sqlite3.Connection) -> bool:
    """Whether a store's tables were begun and never completed: the first experiment is what its creation ends with."""
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if "alembic_version" not in tables or "experiments" not in tables:
        return False  # empty, or not MLflow's
    if database.execute("SELECT count(*) FROM experiments").fetchone()[0]:
        return False
    revisions = {revision for (revision,) in database.execute("SELECT version_num FROM alembic_version")}
    return revisions != _newest_revisions()


def _newest_revisions() -> set[str]:
    """The schema of the MLflow that is installed."""
    from alembic.script import ScriptDirectory

    mlflow = find_spec("mlflow")
    assert mlflow is not None
    assert mlflow.origin is not None
    return set(ScriptDirectory(str(Path(mlflow.origin).parent / "store" / "db_migrations")).get_heads())


def _write(path: Path, *, artifacts: str) -> None:
    """Have MLflow create a store, and leave one file."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    SqlAlchemyStore(f"{SQLITE}{path}", artifacts).engine.dispose()
    with closing(sqlite3.connect(path)) as database:  # the last one to close it
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _has_content(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _companions(path: Path) -> tuple[Path, ...]:
    return tuple(path.with_name(f"{path.name}{suffix}") for suffix in _COMPANIONS)


def _remove(*paths: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)

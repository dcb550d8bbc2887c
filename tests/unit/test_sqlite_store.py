"""A SQLite store whose creation was cut short: recognised, and the file to move away is named."""

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import pytest

from pipeline.errors import ResourceError
from pipeline.tracking import store


def database(path: Path, statements: Iterable[str]) -> Path:
    with closing(sqlite3.connect(path)) as made, made:
        for statement in statements:
            made.execute(statement)
    return path


BEGUN = (
    "CREATE TABLE experiments (experiment_id INTEGER)",
    "CREATE TABLE alembic_version (version_num TEXT)",
    "INSERT INTO alembic_version VALUES ('534353b11cbc')",
)


def test_a_store_that_was_never_completed_is_to_be_moved_away(tmp_path: Path) -> None:
    path = database(tmp_path / "mlflow.db", BEGUN)
    with pytest.raises(ResourceError, match=r"creation was interrupted.*Move it away") as caught:
        store._check_file(path)
    assert str(caught.value).endswith(f": mv {path} {path}.unfinished")


@pytest.mark.parametrize(
    "statements",
    [
        (),
        ("CREATE TABLE of_somebody_else (x)",),
        (*BEGUN, "INSERT INTO experiments VALUES (0)"),  # of an older MLflow, which this one upgrades or refuses
        (*BEGUN, f"UPDATE alembic_version SET version_num = '{next(iter(store.newest_revisions()))}'"),
    ],
    ids=["empty", "another database", "with experiments", "complete"],
)
def test_other_databases_pass(tmp_path: Path, statements: Iterable[str]) -> None:
    store._check_file(database(tmp_path / "mlflow.db", statements))
    store._check_file(tmp_path / "new.db")
    assert not (tmp_path / "new.db").exists()


def test_a_store_that_a_file_server_has_and_its_client_does_not_see_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS answers from its memory that there is no such file, until the file is opened for creation."""
    path = tmp_path / "mlflow.db"
    path.write_text("runs of another job")
    exists, touch, seen = Path.exists, Path.touch, list[Path]()
    monkeypatch.setattr(Path, "exists", lambda self: exists(self) and (self != path or path in seen))
    monkeypatch.setattr(Path, "touch", lambda self: (seen.append(self), touch(self)))
    monkeypatch.setattr(store, "_write_empty_store", lambda path, *, artifacts: path.write_text("empty"))
    store.create_store(f"sqlite:///{path}")
    assert path.read_text() == "runs of another job"
    assert list(tmp_path.iterdir()) == [path]

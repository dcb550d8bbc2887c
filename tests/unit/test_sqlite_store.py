"""A SQLite store: what can be used, and that no store of another machine is replaced."""

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


@pytest.mark.parametrize("statements", [(), ("CREATE TABLE of_somebody_else (x)",)], ids=["empty", "another database"])
def test_a_database_passes_and_what_is_none_is_an_error(tmp_path: Path, statements: Iterable[str]) -> None:
    store._check_file(database(tmp_path / "mlflow.db", statements))
    store._check_file(tmp_path / "new.db")
    assert not (tmp_path / "new.db").exists()
    (tmp_path / "text.db").write_text("no database " * 99)
    with pytest.raises(ResourceError, match=r"text.db can't be used \(file is not a database\). .* move it away"):
        store._check_file(tmp_path / "text.db")


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

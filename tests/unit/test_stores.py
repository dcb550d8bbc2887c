"""Addresses of tracking stores: what can't be used is refused with the form that can."""

from pathlib import Path

import pytest

from pipeline.config.stores import problem_of
from pipeline.errors import ResourceError
from pipeline.recording.outcome import TrackingOutcome
from pipeline.recording.store import check_store


@pytest.mark.parametrize(
    ("uri", "mended"),
    [
        ("sqlite://mlflow.db", "sqlite:///mlflow.db"),
        ("sqlite://data/mlflow.db", "sqlite:///data/mlflow.db"),
        ("sqlite:mlflow.db", "sqlite:///mlflow.db"),
        ("sqlite:/data/mlflow.db", "sqlite:////data/mlflow.db"),
        ("sqlite+pysqlite:///mlflow.db", "sqlite:///mlflow.db"),
        ("sqlite+pysqlite:////data/mlflow.db", "sqlite:////data/mlflow.db"),
        ("sqlite://", "sqlite:///mlflow.db"),
        ("sqlite:", "sqlite:///mlflow.db"),
    ],
)
def test_a_miswritten_sqlite_file_is_answered_with_the_right_form(uri: str, mended: str) -> None:
    assert problem_of(uri).endswith(f"write {mended}")
    assert problem_of(mended) == ""
    with pytest.raises(ResourceError, match=r"tracking\.uri: is sqlite"):
        check_store(uri)


@pytest.mark.parametrize("uri", ["sqlite:////data/mlflow.db?timeout=5", "http://h:5000", "postgresql+psycopg2://h/db"])
def test_other_addresses_pass(uri: str) -> None:
    assert problem_of(uri) == ""


def test_what_another_store_lacks_is_sent_there() -> None:
    outcome = TrackingOutcome(delivered=True, uri="sqlite:///other.db")
    lacking = outcome.lacking("3 events", folder=Path("runs/a"), trouble="disk I/O error")
    assert lacking.message.endswith("pipeline sync runs/a --to sqlite:///other.db")

"""Addresses of tracking stores: what can't be used is refused with the form that can."""

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from pipeline.commands.ui import serve
from pipeline.errors import ResourceError, UsageError
from pipeline.experiment.schema import Checkpoint, Tracking
from pipeline.experiment.train import StartFrom
from pipeline.experiment.uris import problem_of
from pipeline.tracking.outcome import TrackingOutcome
from pipeline.tracking.store import check_store, resolve_uri, run_link, runs_link, ui_address


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
    assert problem_of(uri).rstrip(".").endswith(f"Use {mended}")
    assert problem_of(mended) == ""
    with pytest.raises(ResourceError, match=r"tracking\.uri: is sqlite"):
        check_store(uri)


@pytest.mark.parametrize("uri", ["foo://bar", "redis://localhost"])
def test_an_address_without_a_store_is_refused_when_the_file_is_checked(uri: str) -> None:
    assert problem_of(uri).startswith(f"MLflow has no store for {uri.partition(':')[0]} addresses. Use sqlite:///")
    with pytest.raises(ValidationError, match="MLflow has no store"):
        Tracking(uri=uri)


@pytest.mark.parametrize("uri", ["sqlite:////data/mlflow.db?timeout=5", "http://h:5000", "postgresql+psycopg2://h/db"])
def test_other_addresses_pass(uri: str) -> None:
    assert problem_of(uri) == ""


def test_what_another_store_lacks_is_sent_there() -> None:
    outcome = TrackingOutcome(delivered=True, uri="sqlite:///other.db")
    outcome.fail(Path("runs/a"), trouble="disk I/O error", what="3 events")
    assert outcome.message.endswith("pipeline sync runs/a --to sqlite:///other.db")


def test_stores_that_can_never_be_written_are_found_before_training(tmp_path: Path) -> None:
    corrupt = tmp_path / "corrupt.db"
    corrupt.write_text("this is no database, but long enough to be read as one" * 100)
    for uri, reason in {
        f"sqlite:///{tmp_path}/no/such/mlflow.db": "doesn't exist",
        f"sqlite:///{tmp_path}": "is a folder",
        f"sqlite:///{corrupt}": "file is not a database",
        "redis://localhost": "no store",
    }.items():
        with pytest.raises(ResourceError, match=reason):
            check_store(uri)
    assert corrupt.exists()


def test_relative_files_are_resolved_and_everything_else_is_left_alone(tmp_path: Path) -> None:
    assert resolve_uri("sqlite:///mlflow.db", base=tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"
    assert resolve_uri("sqlite:////data/mlflow.db?timeout=5", base=tmp_path) == "sqlite:////data/mlflow.db?timeout=5"
    assert resolve_uri("http://host:5000", base=tmp_path) == "http://host:5000"


def test_a_home_folder_is_expanded_in_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would make a folder called ~."""
    monkeypatch.setenv("HOME", str(tmp_path))
    tracking = Tracking(uri="sqlite:///~/mlflow.db?timeout=5", directory="~/runs")
    assert (tracking.uri, tracking.directory) == (f"sqlite:///{tmp_path}/mlflow.db?timeout=5", f"{tmp_path}/runs")
    assert StartFrom(file="~/a.safetensors").file == f"{tmp_path}/a.safetensors"
    assert Checkpoint(directory="s3://bucket/~/$a").directory == "s3://bucket/~/$a"
    assert resolve_uri("sqlite:///~/mlflow.db", base=Path("elsewhere")) == f"sqlite:///{tmp_path}/mlflow.db"


@pytest.mark.parametrize(
    ("directory", "message"),
    [
        ("$HOME/runs", "$HOME is not expanded in paths. To insert this environment variable, use ${oc.env:HOME}."),
        ("~nobody-at-all/runs", "~nobody-at-all is not expanded: this user has no home directory."),
    ],
)
def test_a_path_that_cannot_be_expanded_is_rejected(directory: str, message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        Tracking(directory=directory)


def test_links_lead_to_the_page_of_the_run() -> None:
    assert run_link("https://me:secret@host/", "3", "abc") == (
        "https://host/#/experiments/3/runs/abc?workflowType=machine_learning"
    )
    assert run_link("sqlite:////x/mlflow.db", "3", "abc").startswith("pipeline ui")
    assert runs_link(ui_address("https://me:secret@host/"), "3") == (
        "https://host/#/experiments/3/runs?workflowType=machine_learning"
    )


def test_the_ui_needs_a_store_to_show(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no runs yet"):
        serve(f"sqlite:///{tmp_path}/mlflow.db", port=1)
    assert serve("http://user:secret@host:5000", port=1) == "http://host:5000"

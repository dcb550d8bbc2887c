"""Tracking stores: addresses, what can't be used is refused with the form that can; names and links of runs."""

import re
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import pytest
from pydantic import ValidationError

from pipeline.commands.ui import serve
from pipeline.errors import ResourceError, UsageError
from pipeline.experiment.schema import Checkpoint, Tracking
from pipeline.experiment.train import StartFrom
from pipeline.experiment.uris import problem_of
from pipeline.protocol.events import RunOpened
from pipeline.tracking import store
from pipeline.tracking.mlflow import name_run, shared_params
from pipeline.tracking.store import TrackingOutcome, check_store, resolve_uri, run_link, run_page, runs_link, ui_address


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
    (tmp_path / "text.db").write_text("no database " * 99)
    for uri, reason in {
        f"sqlite:///{tmp_path}/no/such/mlflow.db": "doesn't exist",
        f"sqlite:///{tmp_path}": "is a folder",
        f"sqlite:///{tmp_path}/text.db": r"text.db can't be used \(file is not a database\). .* move it away",
        "redis://localhost": "no store",
    }.items():
        with pytest.raises(ResourceError, match=reason):
            check_store(uri)
    assert (tmp_path / "text.db").exists()


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
    for address in ("http://127.0.0.1:5000", ""):
        page = f"{address}/#/" if address else "#/"
        assert run_page(address, "7", "abc") == f"{page}experiments/7/runs/abc?workflowType=machine_learning"
    assert runs_link(ui_address("https://me:secret@host/"), "3") == (
        "https://host/#/experiments/3/runs?workflowType=machine_learning"
    )


def test_the_ui_needs_a_store_to_show(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no runs yet"):
        serve(f"sqlite:///{tmp_path}/mlflow.db", port=1)
    assert serve("http://user:secret@host:5000", port=1) == "http://host:5000"


# SQLite files


def database(path: Path, statements: Iterable[str]) -> Path:
    with closing(sqlite3.connect(path)) as made, made:
        for statement in statements:
            made.execute(statement)
    return path


@pytest.mark.parametrize("statements", [(), ("CREATE TABLE of_somebody_else (x)",)], ids=["empty", "another database"])
def test_a_database_passes_and_none_is_made(tmp_path: Path, statements: Iterable[str]) -> None:
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


# Names of runs and parameters of a sweep

PARAMS = {"metrics.accuracy._target_": "torchmetrics.Accuracy", "name": "lab", "train.epochs": "3"}
SWEEP = {
    **PARAMS,
    "sweep.metric": "validation/accuracy",
    "sweep.mode": "max",
    "sweep.parameters.optimizer.lr.log_uniform": "[0.001, 1.0]",
    "sweep.parameters.model.hidden.choice[0]": "[32]",
    "sweep.parameters.model.hidden.choice[1]": "[64, 64]",
    "sweep.parameters.loss.choice[0]._target_": "torch.nn.CrossEntropyLoss",
    "sweep.parameters.loss.choice[1].weight": "2",
    "sweep.trials": "8",
}


def test_a_run_is_named_by_what_it_is() -> None:
    def opened(title: str = "", **tags: str) -> RunOpened:
        return RunOpened(
            run="20261126-lab", tracking_uri="", tracking_experiment="lab", title=title, tags=tags, params={},
            trials=("main",),
        )  # fmt: skip

    ddp = {"role": "main", "strategy": "ddp", "world_size": "2"}
    assert name_run(opened(**ddp)) == "ddp, 2 workers"
    assert name_run(opened(quick="true", **ddp)) == "quick test: ddp, 2 workers"
    assert name_run(opened("my run", **ddp)) == "my run"
    assert (name_run(opened(role="benchmark")), name_run(opened(role="sweep"))) == ("benchmark", "sweep")


def test_a_sweep_has_no_values_of_its_own_for_what_it_varies() -> None:
    own = {
        "optimizer.lr": "0.1",
        "model.hidden": "[8]",
        "loss._target_": "x",
        "optimizer.lr_decay": "2",
        "model.h": "1",
    }
    kept = shared_params({**SWEEP, **own})
    assert kept.keys() & own.keys() == {"optimizer.lr_decay", "model.h"}
    assert SWEEP.items() <= kept.items()
    assert shared_params({**PARAMS, **own}) == {**PARAMS, **own}

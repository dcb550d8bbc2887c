"""The address of a run in MLflow, told as soon as MLflow has the run."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest
import rich.console

from pipeline.record.terminal.terminal import linked
from pipeline.tracking.mlflow import mlflow_subscriber
from pipeline.tracking.mlflow.outcome import TrackingOutcome, link_of

ADDRESS = "http://127.0.0.1:5000/#/experiments/1/runs/0f3a?workflowType=machine_learning"
OPENED = TrackingOutcome(experiment_id="1", run_id="0f3a", delivered=True)


def subscribed(
    folder: Path, stdout: IO[bytes], monkeypatch: pytest.MonkeyPatch
) -> tuple[mlflow_subscriber.MlflowSubscriber, list[str]]:
    """A subscriber whose process says what is in ``stdout``, and the runs that it has told of."""
    process = SimpleNamespace(stdin=io.BytesIO(), stdout=stdout, wait=lambda: 0, kill=lambda: None, returncode=0)
    monkeypatch.setattr(mlflow_subscriber, "_begun", [mlflow_subscriber._Process(process, io.BytesIO())])
    told: list[str] = []
    subscriber = mlflow_subscriber.MlflowSubscriber(
        folder=folder, log=folder / "log.txt", warn=pytest.fail, opened=told.append
    )
    return subscriber, told


LINE = f"mlflow   {ADDRESS}"
REPLIES = f"{LINE}\n".encode()


def test_a_run_is_told_as_soon_as_the_store_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subscriber, told = subscribed(tmp_path, io.BytesIO(REPLIES), monkeypatch)
    subscriber._done.wait(60)
    subscriber.close()
    assert told == [LINE]


def test_the_end_of_a_run_names_all_places_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "replies").write_bytes(REPLIES)
    with (tmp_path / "replies").open("rb") as replies:
        monkeypatch.setattr(mlflow_subscriber.MlflowSubscriber, "_listen", lambda *_: None)  # until the run has ended
        subscriber, told = subscribed(tmp_path, replies, monkeypatch)
        subscriber.finish(0)
        monkeypatch.undo()
        subscriber._listen(replies)
    subscriber.close()
    assert told == []


def test_what_an_earlier_session_has_sent_says_nothing_of_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    OPENED.keep(tmp_path)
    monkeypatch.setattr(mlflow_subscriber.MlflowSubscriber, "_listen", lambda *_: None)  # the process says nothing
    subscriber, _ = subscribed(tmp_path, io.BytesIO(), monkeypatch)
    killed = TrackingOutcome.kept(tmp_path)
    assert killed is not None
    assert (killed.run_id, killed.delivered) == ("0f3a", False)
    assert "some results (the driver was killed)" in killed.message
    assert subscriber.finish(0) is None
    assert "some results (the run stopped waiting)" in subscriber.outcome.message
    assert subscriber.late == ("MLflow",)
    subscriber.close()


def test_addresses_are_links_that_no_terminal_breaks() -> None:
    stdout = rich.console.Console(file=io.StringIO(), width=40, force_terminal=True, color_system="truecolor")
    pipe = rich.console.Console(file=io.StringIO(), width=40)
    line = link_of("sqlite:///mlflow.db", OPENED)
    for console in (stdout, pipe):
        console.print(linked(line), soft_wrap=True)
    assert isinstance(stdout.file, io.StringIO)
    assert isinstance(pipe.file, io.StringIO)
    assert pipe.file.getvalue() == f"mlflow   pipeline ui, then {ADDRESS}\n"
    shown = stdout.file.getvalue()
    assert shown.startswith("mlflow   pipeline ui, then \x1b]8;id=")
    assert f";{ADDRESS}\x1b\\{ADDRESS}\x1b]8;;\x1b\\\n" in shown

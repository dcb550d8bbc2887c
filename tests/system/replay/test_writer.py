"""MLflow beside a run: refused events, long journals, runs that can't be sent, and the process that writes."""

# promise: contents of MLflow for every kind of run; no duplicates; the writer never blocks
# promise: a run without a step is neither listed nor sent

import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE
from recordings import Recording, Store, delivery

from pipeline.errors import UsageError
from pipeline.protocol.events import AnyEvent, Metrics, Point, RunClosed, RunOpened
from pipeline.record import journal as journals
from pipeline.tracking import follow
from pipeline.tracking.follow import sync
from pipeline.tracking.follower import Follower

Journal = Callable[[str], Recording]
BLOCKED_S = 0.1  # An event that takes longer has waited for somebody


class _Unspeakable(Exception):
    """An exception without a text."""

    def __str__(self) -> str:
        raise KeyError


def opened(store: Store, **more: Any) -> RunOpened:
    return RunOpened(
        time=1.7e9,
        run="made",
        tracking_uri=store.uri,
        tracking_experiment="made",
        tags={"strategy": "single", "world_size": "1"},
        params={},
        trials=("main",),
    ).model_copy(update=more)


def metrics(step: int, *names: str) -> Metrics:
    points = tuple(Point(name, step, 1 / (step + 1)) for name in names or ("train/loss",))
    return Metrics(time=1.7e9 + step, step=step, epoch=1, points=points)


def journaled(folder: Path, events: Sequence[AnyEvent]) -> Path:
    folder.mkdir(exist_ok=True)
    journal = journals.Journal(folder / journals.FILE_NAME)
    for event in events:
        journal.append(event)
    journal.close()
    return folder


def test_no_event_waits_for_the_writer_whatever_it_does(store: Store, tmp_path: Path) -> None:
    """It is stopped here, as by a store that hangs."""
    journaled(tmp_path, [opened(store)])
    follower = Follower(tmp_path, uri=store.uri, warn=print)
    writer = started_writer()
    writer.send_signal(signal.SIGSTOP)
    longest = 0.0
    for event in (*map(metrics, range(20)), RunClosed(status="FINISHED", summary="x" * 9999)):
        began = time.monotonic()
        follower.receive(event)
        longest = max(longest, time.monotonic() - began)
    assert not follower.finish(timeout_s=0.01)
    follower.close()
    assert longest < BLOCKED_S
    assert not writer.is_running()


def test_a_writer_that_dies_takes_no_results_with_it(store: Store, journal: Journal, capsys: Any) -> None:
    """What it was to send is in the journal; the user hears of it at once."""
    folder, told = journal("nan").folder, list[str]()
    follower = Follower(folder, uri=store.uri, warn=told.append)
    started_writer().kill()
    assert follower.finish(timeout_s=120)
    outcome = follower.close()
    assert not outcome.delivered
    assert "ended with exit code -9" in outcome.message
    assert outcome.message.endswith(f"pipeline sync {folder}")
    assert len(told) == 1
    assert "they wait in" in told[0]
    assert sync(folder, warn=pytest.fail).delivered
    assert [run.info.status for run in store.runs("lab")] == ["FINISHED"]


def test_a_run_that_ends_before_its_first_step_is_not_sent(store: Store, tmp_path: Path) -> None:
    journaled(tmp_path, [opened(store), RunClosed(time=1.7e9, status="FAILED", message="wrong")])

    sending = delivery(tmp_path, uri=store.uri, warn=print)
    sending.end = journals.ending(tmp_path / journals.FILE_NAME)
    sending.ending.set()
    sending.send()
    outcome = sending.sent

    assert (outcome.run_id, outcome.delivered) == ("", True)
    assert not store.client.get_experiment_by_name("made")
    with pytest.raises(UsageError, match="nothing to send, because the run ended before its first step"):
        sync(tmp_path, warn=print)


def test_an_end_that_the_journal_has_no_room_for_is_written_all_the_same(store: Store, journal: Journal) -> None:
    recording, told = journal("nan-stopped"), list[str]()
    path = recording.folder / journals.FILE_NAME
    whole, end = path.read_bytes(), recording.events[-1]
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
    follower = Follower(recording.folder, uri=store.uri, warn=told.append, loggers=["tensorboard"])
    follower.receive(end)
    assert follower.late == ["MLflow", "tensorboard"]
    assert follower.finish(timeout_s=120)
    assert follower.late == []
    outcome = follower.close()
    assert (outcome.delivered, outcome.message, told) == (True, "", [])
    assert list((recording.folder / "tensorboard" / "main").iterdir())
    before = store.contents("lab")
    path.write_bytes(whole)
    assert sync(recording.folder, warn=pytest.fail).run_id == outcome.run_id
    assert store.contents("lab") == before


def started_writer(timeout_s: float = 60) -> psutil.Process:
    """Wait for the one process that writes to MLflow; on a busy machine its command line is not there at once."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        there = [each for each in psutil.Process().children() if "tracking.follow" in " ".join(each.cmdline())]
        if len(there) == 1:
            return there[0]
        time.sleep(0.01)
    pytest.fail(f"no process of pipeline.tracking.follow within {timeout_s:g} s")


def test_two_thousand_points_of_a_killed_driver_are_sent_though_the_first_writer_is_killed(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise SystemExit

    names = [f"train/loss_{n}" for n in range(10)]
    folder = journaled(tmp_path / "long", [opened(store), *(metrics(step, *names) for step in range(200))])
    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_batch", killed)
        assert not sync(folder, warn=pytest.fail).delivered
    outcome = sync(folder, warn=pytest.fail)
    run = store.client.get_run(outcome.run_id)
    assert (run.info.status, run.info.end_time) == ("KILLED", int((1.7e9 + 199) * 1000))
    assert [len(store.series(run, name)) for name in names] == [200] * 10


def test_events_that_mlflow_refuses_take_no_others_with_them(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def log_batch(self: MlflowClient, run_id: str, metrics: Sequence[Any] = (), **more: Any) -> Any:
        if any(metric.step == 2 for metric in metrics):
            raise MlflowException("invalid timestamp", INVALID_PARAMETER_VALUE)
        return accepted(self, run_id, metrics, **more)

    accepted = MlflowClient.log_batch
    monkeypatch.setattr(MlflowClient, "log_batch", log_batch)
    events = [opened(store), metrics(2), metrics(0), metrics(1), RunClosed(time=1.7e9, status="FINISHED")]
    told: list[str] = []
    outcome = sync(journaled(tmp_path / "refused", events), warn=told.append)
    assert outcome.delivered
    assert outcome.message.startswith("MLflow rejected 1 event, kept in ")
    assert len(told) == 1
    assert "timestamp" in told[0]
    (run,) = store.runs("made")
    assert len(store.series(run, "train/loss")) == 2


def test_parameters_that_a_resumed_run_has_changed_become_tags(store: Store, tmp_path: Path) -> None:
    first, second = (opened(store, params={"train.epochs": epochs}) for epochs in ("2", "3"))
    sync(journaled(tmp_path / "longer", [first, second, RunClosed(time=1.7e9, status="FINISHED")]), warn=pytest.fail)
    (run,) = store.runs("made")
    assert run.data.params["train.epochs"] == "2"
    assert run.data.tags["changed.train.epochs"] == "3"


def test_what_mlflow_has_no_room_for_is_cut_and_renamed(store: Store, tmp_path: Path) -> None:
    params = {"model.layers": "x" * 7000} | {f"many.{i}": str(i) for i in range(120)}
    events = [opened(store, params=params), metrics(1, "validation/top@5 [%]"), RunClosed(time=1.7e9, status="FAILED")]
    sync(journaled(tmp_path / "large", events), warn=pytest.fail)
    (run,) = store.runs("made")
    assert (len(run.data.params["model.layers"]), run.data.params["model.layers"][-5:]) == (6000, "[cut]")
    assert run.data.params["many.119"] == "119"
    assert run.data.metrics == {"validation/top_5 ___": 0.5}


def test_names_that_mlflow_does_not_accept_are_told_apart(store: Store, tmp_path: Path) -> None:
    params = {"optimizer.lr": "0.1", "optimizer.groups[0].lr": "0.2"} | {
        f"labels.{name}": name for name in ("+", "*", "a//b", "a/", "../a")
    }
    journaled(tmp_path / "names", [opened(store, params=params), metrics(1), RunClosed(time=1.7e9, status="FINISHED")])
    assert sync(tmp_path / "names", warn=pytest.fail).message.startswith("all of ")
    (run,) = store.runs("made")
    names = [
        "optimizer.lr",
        "optimizer.groups_0_.lr",
        "labels._",
        "labels.__2",
        "labels.a/_/b",
        "labels.a/_",
    ]
    names += ["labels.../a"]
    assert run.data.params == dict(zip(names, params.values(), strict=True))


def test_a_deleted_experiment_names_the_command_that_restores_it(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = journaled(tmp_path / "gone", [opened(store), metrics(1), RunClosed(time=1.7e9, status="FINISHED")])
    known = sync(folder, warn=pytest.fail).experiment_id
    store.client.delete_experiment(known)
    monkeypatch.setattr(follow, "_PAUSES_S", (0.0,))
    outcome = sync(folder, warn=[].append)
    assert not outcome.delivered
    assert f"MLFLOW_TRACKING_URI={store.uri} mlflow experiments restore -x {known}" in outcome.message
    store.client.restore_experiment(known)
    assert sync(folder, warn=pytest.fail).delivered


@pytest.mark.parametrize("error", [SystemExit(0), ModuleNotFoundError("No module named 'mlflow.x'"), _Unspeakable()])
def test_whatever_ends_the_delivery_is_reported(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """As a user's file mlflow.py may: it raises in the handler of an error as well."""
    folder = journaled(tmp_path / "hidden", [opened(store), metrics(1), RunClosed(time=1.7e9, status="FINISHED")])

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(follow, "_PAUSES_S", (0.0,))
    monkeypatch.setattr(follow, "create_store", fail)
    monkeypatch.setitem(sys.modules, "mlflow.exceptions", None)
    sending = delivery(folder, uri="", warn=print)
    sending.ending.set()
    assert not sending.send()
    outcome = sending.sent
    assert not outcome.delivered
    assert "pipeline sync" in outcome.message
    assert isinstance(error, Exception) or "SystemExit(0)" in outcome.message


def test_a_file_that_the_artifact_store_does_not_take_is_not_delivered(
    store: Store, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'boto3'", name="boto3")

    folder = journal("interrupted").folder
    with monkeypatch.context() as patch:
        patch.setattr(follow, "_PAUSES_S", (0.0,))
        patch.setattr(MlflowClient, "log_artifact", fail)
        outcome = sync(folder, warn=[].append)
    assert not outcome.delivered
    assert "(No module named 'boto3'). Nothing is lost" in outcome.message
    assert sync(folder, warn=pytest.fail).delivered


def test_a_model_that_cannot_be_built_again_is_a_warning(store: Store, journal: Journal) -> None:
    folder, told = journal("single").folder, list[str]()
    experiment = folder / "experiment.yaml"
    experiment.write_text(experiment.read_text().replace("in_features: 64", "in_features: 65"))
    assert sync(folder, warn=told.append).message.startswith(f"all of {folder} except its model is in MLflow: ")
    assert len(told) == 1
    assert "the model isn't logged" in told[0]
    assert [run.info.status for run in store.runs("tiny")] == ["FINISHED"]


def test_a_file_that_is_gone_is_a_warning(store: Store, journal: Journal) -> None:
    folder, told = journal("interrupted").folder, list[str]()
    (folder / "environment.txt").unlink()
    assert sync(folder, warn=told.append).delivered
    (line,) = told
    assert line.endswith("environment.txt was deleted, so it is missing from the run's artifacts in MLflow")


def test_a_run_that_goes_on_is_not_sent(store: Store, tmp_path: Path) -> None:
    journal = journals.Journal(tmp_path / journals.FILE_NAME)
    journal.append(opened(store))
    with pytest.raises(UsageError, match="still running"):
        sync(tmp_path, warn=print)
    journal.close()


def test_the_command_says_where_the_results_are(store: Store, journal: Journal, lab: Path, command: Any) -> None:
    sent = command("sync", str(journal("failed").folder))
    assert sent.code == 0, sent.output  # a slow machine also says how far it is
    assert f"all of {journal('failed').folder} is in MLflow: pipeline ui, then http" in sent.stdout
    sweep = command("sync", str(journal("sweep").folder))  # its trials, too
    assert sweep.code == 0, sweep.output
    children = [run for run in store.runs("tiny") if "mlflow.parentRunId" in run.data.tags]
    assert [run.data.params["optimizer.lr"] for run in children if run.data.tags.get("best") == "true"] == ["0.05"]
    assert len(children) == 3
    nothing = command("sync", str(lab))
    assert (nothing.code, "no such run" in nothing.stderr) == (2, True)

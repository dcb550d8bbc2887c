"""Results reach MLflow exactly once, in a SQLite file and through a server; stores that fail: test_outages.py."""

import json
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from mlflow import MlflowClient
from mlflow.entities import Run
from stores import Server

from pipeline.commands.ui import pages, serve
from pipeline.errors import ResourceError, UsageError
from pipeline.models.mlp import MLP
from pipeline.protocol.events import (
    AnyEvent,
    ArtifactSaved,
    Finished,
    Metrics,
    ModelSaved,
    Point,
    RunClosed,
    RunOpened,
    Started,
    TrialOpened,
)
from pipeline.protocol.trial_result import Spread, StepParts, TrialResult
from pipeline.record.journal import FILE_NAME, Journal
from pipeline.tracking import mlflow
from pipeline.tracking.follow import quiet, sync
from pipeline.tracking.follower import Follower
from pipeline.tracking.mlflow import MlflowRun
from pipeline.tracking.store import TrackingOutcome, check_store, places_of, resolve_uri, run_link, runs_link
from pipeline.train.reference import ModelCall, record

pytestmark = pytest.mark.filterwarnings(
    "ignore:For backward compatibility, 'str' dtypes:DeprecationWarning",  # MLflow's log_table on pandas 3
)

T0 = 1_700_000_000.0
MODEL = {"_target_": "pipeline.models.mlp.MLP", "in_features": 4, "hidden": [8], "num_classes": 3}
EXPERIMENT = {
    "name": "mlp",
    "model": MODEL,
    "data": {"_target_": "pipeline.data.digits"},
    "loss": {"_target_": "torch.nn.CrossEntropyLoss"},
    "optimizer": {"_target_": "torch.optim.SGD"},
    "train": {"epochs": 1, "global_batch_size": 8},
}
TABLE = {"columns": ["trial", "speedup"], "data": [["single", 1.0], ["ddp, 2 workers", 1.9]]}
"""In the form that MLflow's table artifacts have."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A SQLite store shared by the tests of this module; creating one takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.fixture
def warnings_told() -> list[str]:
    return []


def opened(uri: str, run: str) -> RunOpened:
    return RunOpened(
        time=T0,
        run=run,
        tracking_uri=uri,
        tracking_experiment="mlflow-test",
        tags={"strategy": "ddp", "world_size": "2", "git_commit": "0123abcd"},
        params={"train.epochs": "2", "metrics.accuracy._target_": "torchmetrics.Accuracy", "model.layers": "x" * 7000}
        | {f"many.{i}": str(i) for i in range(120)},
        trials=("main", "baseline"),
    )


def metrics(step: int, *, trial: str = "main", names: int = 1) -> Metrics:
    points = tuple(Point(f"train/loss_{n}", step, 1.0 / (step + 1) + n) for n in range(names))
    return Metrics(time=T0 + step, trial=trial, step=step, epoch=1, points=points)


def finished(trial: str, *, memory: tuple[float, ...]) -> Finished:
    result = TrialResult(
        trial=trial,
        steps=20,
        epochs=1,
        samples_per_second=Spread(median=640.0, low=600.0, high=650.0, windows=3),
        step_ms=Spread(median=12.5, low=12.0, high=13.0, windows=3),
        parts=StepParts(
            held_ms=Spread(median=12.6, low=12.0, high=13.0, windows=3),
            compute_ms=11.0,
            data_wait_ms=0.25,
            rest_ms=1.25,
            ranks=(Spread(median=12.5, low=12.0, high=13.0, windows=7),),
            nodes=("node-1",),
        ),
        peak_memory_mb=memory,
        gradient_mb=2.8,
    )
    return Finished(time=T0 + 50, trial=trial, result=result, time_to_first_step_s=2.5)


def started(trial: str) -> Started:
    return Started(
        time=T0 + 1,
        trial=trial,
        total_steps=20,
        steps_per_epoch=10,
        epochs=2,
        train_samples=80,
        epoch_samples=80,
        validation_samples=16,
        parameters=1234,
        devices=("node-1 cpu, 1 thread", "node-2 cpu, 1 thread"),
        data_name="pipeline.data.digits",
        data_digest="0123456789abcdef",
    )


def test_the_version_of_the_data_is_next_to_its_digest() -> None:
    event = started("main").model_copy(update={"data_version": "9f2c" * 50})
    for given, part in zip(mlflow.datasets(event), ("train", "validation"), strict=True):
        name, _, version = given.dataset.name.partition(", version ")
        assert (name, given.dataset.digest) == (f"pipeline.data.digits/{part}", "0123456789abcdef")
        assert (version[:4], len(version)) == ("9f2c", 100)


def whole_run(uri: str, run: str) -> list[AnyEvent]:
    return [
        opened(uri, run),
        TrialOpened(
            time=T0, trial="main", role="main", title="ddp, 2 workers", tags={"world_size": "2"}, params={"a": "1"}
        ),
        started("main").model_copy(update={"data_version": "9f2c"}),
        *(metrics(step) for step in range(20)),
        Metrics(time=T0 + 40, step=20, epoch=2, points=(Point("validation/accuracy", 20, float("nan")),)),
        finished("main", memory=(100.0, 120.0)),
        TrialOpened(time=T0 + 41, trial="baseline", role="baseline", title="single", tags={}, params={"a": "2"}),
        started("baseline"),
        *(metrics(step, trial="baseline") for step in range(5)),
        finished("baseline", memory=(90.0,)),
        ArtifactSaved(time=T0 + 55, path="report/speedup_table.json"),
        ArtifactSaved(time=T0 + 55, path="experiment.yaml"),
        ModelSaved(time=T0 + 56, weights="model/weights.pt", example="model/example.pt"),
        RunClosed(time=T0 + 60, status="FINISHED", summary="**1.9x** on two workers"),
    ]


def run_folder(tmp_path: Path, *, experiment: dict[str, object] = EXPERIMENT) -> Path:
    folder = tmp_path / "runs" / "one"
    for part in ("report", "model"):
        (folder / part).mkdir(parents=True)
    (folder / "report" / "speedup_table.json").write_text(json.dumps(TABLE))
    (folder / "experiment.yaml").write_text(yaml.safe_dump(experiment))
    model, inputs = MLP(4, hidden=[8], num_classes=3).eval(), torch.ones(2, 4)
    torch.save(model.state_dict(), folder / "model" / "weights.pt")
    torch.save(inputs, folder / "model" / "example.pt")
    call = ModelCall.of(inputs)
    record(model, call, device=inputs.device, is_exact=True, runtime={}).save(folder / "model" / "reference.pt")
    return folder


def journaled(folder: Path, events: list[AnyEvent]) -> Path:
    journal = Journal(folder / FILE_NAME)
    for event in events:
        journal.append(event)
    journal.close()
    return folder


def deliver(folder: Path, events: list[AnyEvent], *, warn: Callable[[str], None]) -> TrackingOutcome:
    """Have the process send a journal of these events."""
    journaled(folder, events)
    (opened,) = (event for event in events if isinstance(event, RunOpened))
    one = Follower(folder, uri=opened.tracking_uri, warn=warn)
    one.receive(events[-1])
    assert one.finish(timeout_s=120)
    return one.close()


def client_of(uri: str) -> MlflowClient:
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def contents(uri: str, outcome: TrackingOutcome) -> dict[str, object]:
    """All that a replay could double, by run."""
    client = client_of(uri)
    found: dict[str, object] = {}
    name = client.get_run(outcome.run_id).data.tags["pipeline.run"]
    runs = client.search_runs([outcome.experiment_id], filter_string=f"tags.`pipeline.run` = '{name}'")
    for run in runs:
        history = {key: client.get_metric_history(run.info.run_id, key) for key in run.data.metrics}
        found[run.info.run_name] = (
            {key: sorted((p.step, p.timestamp, str(p.value)) for p in points) for key, points in history.items()},
            run.data.params,
            run.data.tags,
            (run.info.status, run.info.start_time, run.info.end_time),
            [(given.dataset.name, given.dataset.digest) for given in run.inputs.dataset_inputs],
            [output.model_id for output in run.outputs.model_outputs],
            sorted(entry.path for entry in client.list_artifacts(run.info.run_id)),
        )
    return found


def assert_is_a_table(client: MlflowClient, run_id: str, tmp_path: Path) -> None:
    """Our table is what MLflow itself would have made of the same data."""
    other = client.create_run(client.get_run(run_id).info.experiment_id).info.run_id
    columns = zip(*TABLE["data"], strict=True)
    client.log_table(other, dict(zip(TABLE["columns"], columns, strict=True)), "report/speedup_table.json")
    ours, theirs = (
        (
            client.get_run(each).data.tags["mlflow.loggedArtifacts"],
            json.loads(Path(client.download_artifacts(each, "report/speedup_table.json", str(tmp_path))).read_text()),
        )
        for each in (run_id, other)
    )
    assert ours == theirs


def child_of(uri: str, outcome: TrackingOutcome) -> Run:
    where = f"tags.`mlflow.parentRunId` = '{outcome.run_id}'"
    (child,) = client_of(uri).search_runs([outcome.experiment_id], filter_string=where)
    return child


@pytest.fixture(scope="module", params=["sqlite", "server"])
def store(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue("database") if request.param == "sqlite" else request.getfixturevalue("server").uri


def test_a_whole_run_is_laid_out_for_the_ui_and_a_replay_adds_nothing(
    store: str, tmp_path: Path, warnings_told: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = run_folder(tmp_path)
    events = whole_run(store, "whole")
    outcome = deliver(folder, events, warn=warnings_told.append)
    assert (outcome.delivered, outcome.message, warnings_told) == (True, "", [])
    assert capfd.readouterr() == ("", "")

    client = client_of(store)
    run, child = client.get_run(outcome.run_id), child_of(store, outcome)
    assert (run.info.run_name, run.info.status, run.info.start_time, run.info.end_time) == (
        "ddp, 2 workers", "FINISHED", int(T0 * 1000), int((T0 + 60) * 1000),
    )  # fmt: skip
    assert run.data.tags["mlflow.note.content"] == "**1.9x** on two workers"
    assert run.data.tags["mlflow.source.git.commit"] == "0123abcd"
    assert run.data.tags["world_size"] == "2"
    assert run.data.params["train_samples"] == "80"
    assert (run.data.params["data_version"], run.data.params["many.119"]) == ("9f2c", "119")
    assert len(run.data.params["model.layers"]) == 6000
    assert run.data.params["model.layers"].endswith("[cut]")
    assert run.data.metrics["samples_per_second"] == 640.0
    assert run.data.metrics["memory/peak_mib"] == 120.0
    assert run.data.metrics["memory/peak_mib_rank_1"] == 120.0
    assert run.data.metrics["time_to_first_step_s"] == 2.5
    assert "time/exposed_communication_ms" not in run.data.metrics
    assert [tag.value for given in run.inputs.dataset_inputs for tag in given.tags] == ["train", "validation"]
    assert (child.info.run_name, child.info.status, child.data.params["a"]) == ("baseline: single", "FINISHED", "2")
    assert "data_version" not in child.data.params
    assert len(client.get_metric_history(child.info.run_id, "train/loss_0")) == 5
    assert_is_a_table(client, outcome.run_id, tmp_path)

    before = contents(store, outcome)
    for _ in range(2):
        again = sync(folder, warn=warnings_told.append)
        assert (again.delivered, again.run_id) == (True, outcome.run_id)
        assert run_link(store, outcome.experiment_id, outcome.run_id) in again.message
    assert contents(store, outcome) == before
    assert warnings_told == []


def test_a_model_that_cannot_be_exported_is_logged_as_pickle(
    database: str, tmp_path: Path, warnings_told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.pipeline]\npackages = ["branching"]\n')
    (tmp_path / "branching.py").write_text(
        "from pipeline.models.mlp import MLP\n"
        "class Branching(MLP):\n"
        "    def forward(self, inputs):\n"
        "        return super().forward(inputs if inputs.sum().item() > 0 else -inputs)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    folder = run_folder(tmp_path, experiment=EXPERIMENT | {"model": MODEL | {"_target_": "branching.Branching"}})
    outcome = deliver(folder, whole_run(database, "pickle"), warn=warnings_told.append)
    (output,) = client_of(database).get_run(outcome.run_id).outputs.model_outputs
    assert client_of(database).get_logged_model(output.model_id).status == "READY"
    assert len(warnings_told) == 1
    assert "logged as pickle, because torch.export failed" in warnings_told[0]


def test_what_a_dead_server_missed_is_sent_by_sync(server: Server, tmp_path: Path, warnings_told: list[str]) -> None:
    events = [opened(server.uri, "late"), metrics(0), RunClosed(time=T0 + 9, status="FINISHED")]
    server.kill()
    try:
        outcome = deliver(tmp_path, events, warn=warnings_told.append)
    finally:
        server.start()
    assert not outcome.delivered
    assert outcome.message.startswith("not in MLflow yet: 3 events (")
    assert outcome.message.endswith(f"pipeline sync {tmp_path}")
    outcome = sync(tmp_path, warn=warnings_told.append)
    assert outcome.delivered
    assert len(client_of(server.uri).get_metric_history(outcome.run_id, "train/loss_0")) == 1


def test_a_journal_is_sent_to_another_store(database: str, tmp_path: Path, warnings_told: list[str]) -> None:
    folder = journaled(
        tmp_path, [opened("sqlite://mlflow.db", "moved"), metrics(0), RunClosed(time=T0 + 9, status="FINISHED")]
    )
    with pytest.raises(ResourceError, match=r"Use sqlite:///mlflow\.db\n.*pipeline sync .* --to URI"):
        sync(folder, warn=warnings_told.append)

    outcome = sync(folder, warn=warnings_told.append, to=database)

    assert (outcome.delivered, outcome.uri, warnings_told) == (True, database, [])
    assert client_of(database).get_run(outcome.run_id).data.metrics
    assert run_link(database, outcome.experiment_id, outcome.run_id) in places_of(folder)


def test_the_process_goes_with_the_one_that_trains(database: str, tmp_path: Path) -> None:
    """Killed, it can't tell anyone; nobody may be left who writes to a run that is resumed."""
    program = (
        "import sys, time; from pathlib import Path\n"
        "from pipeline.tracking.follower import Follower\n"
        "Follower(Path(sys.argv[1]), uri=sys.argv[2], warn=print)\n"
        "print('ready', flush=True); time.sleep(600)"
    )
    journaled(tmp_path, [opened(database, "orphan"), metrics(0)])
    command = [sys.executable, "-c", program, str(tmp_path), database]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "ready\n"
        (process,) = psutil.Process(driver.pid).children()
        driver.kill()
    assert psutil.wait_procs([process], timeout=60)[1] == []


def test_a_process_that_cannot_start_is_told_and_its_reason_is_in_the_log(
    database: str, tmp_path: Path, warnings_told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "pydantic.py").write_text("raise SystemExit('a broken installation')")
    monkeypatch.syspath_prepend(tmp_path / "hidden")
    journaled(tmp_path, [opened(database, "broken"), metrics(0)])
    follower = Follower(tmp_path, uri=database, warn=warnings_told.append)
    assert follower._done.wait(60)
    follower.receive(RunClosed(status="FINISHED"))  # long after its end, of which the driver knows
    assert "a broken installation" in (tmp_path / "log.txt").read_text()
    assert all("ended with exit code 1" in text for text in (warnings_told[0], follower.close().message))


def test_no_run_ends_before_its_metrics_are_there(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All events may come in one batch, and the process may end between two calls."""
    first = opened(database, "cut")
    run = MlflowRun(tmp_path, client=client_of(database), opened=first, sent=TrackingOutcome(), warn=print)

    def fail(*args: object, **given: object) -> None:
        if given.get("metrics"):
            raise OSError("cut off")

    events = [first, metrics(0), RunClosed(time=T0 + 9, status="FINISHED")]
    monkeypatch.setattr(MlflowClient, "log_batch", fail)
    with quiet(), pytest.raises(OSError, match="cut off"):
        run.write(events)
    assert client_of(database).get_run(run.sent.run_id).info.status == "RUNNING"


def checked_by_nobody(uri: str) -> str:
    """What `check_store` says to a user who is not root."""
    program = """
import os, sys
from pipeline.errors import ResourceError
from pipeline.tracking.store import check_store
if os.geteuid() == 0:
    os.setuid(65534)
try:
    print(check_store(sys.argv[1]))
except ResourceError as error:
    print(error)
"""
    return subprocess.run([sys.executable, "-c", program, uri], capture_output=True, text=True, check=True).stdout


def test_stores_without_permission_are_found_before_training() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to other users
        path = Path(folder) / "mlflow.db"
        with closing(sqlite3.connect(path)) as made:
            made.execute("CREATE TABLE t (x)")
        path.chmod(0o444)
        path.parent.chmod(0o777)
        assert f"{path} can't be used (no permission to write)" in checked_by_nobody(f"sqlite:///{path}")
        path.parent.chmod(0o555)
        assert f"can't write to {folder}" in checked_by_nobody(f"sqlite:///{folder}/other.db")
        path.parent.chmod(0o700)


def test_usable_stores_pass_and_a_silent_server_is_a_warning(server: Server, database: str, tmp_path: Path) -> None:
    assert check_store(resolve_uri("sqlite:///new.db", base=tmp_path)) is None
    assert not (tmp_path / "new.db").exists()
    assert check_store(server.uri) is None
    warning = check_store("http://user:secret@127.0.0.1:1")
    assert warning is not None
    assert "http://127.0.0.1:1 doesn't answer" in warning


def test_the_ui_answers_on_its_port_and_goes_without_a_trace(database: str, tmp_path: Path) -> None:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = f"""from pipeline.commands.ui import serve
serve({database!r}, port={port}, ready=lambda address: print(address, flush=True))"""
    outcome = deliver(tmp_path, [opened(database, "ui"), RunClosed(time=T0, status="FINISHED")], warn=print)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        address = process.stdout.readline().decode().strip()
        assert address == f"http://127.0.0.1:{port}"
        with urllib.request.urlopen(address, timeout=10) as page:
            assert b"MLflow" in page.read()
        assert ("mlflow-test", runs_link(address, outcome.experiment_id)) in list(pages(address))
        with pytest.raises(UsageError, match=f"port {port} .*--port"):
            serve(database, port=port)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0
    assert run_link(database, "1", "abc").startswith("pipeline ui, then http://127.0.0.1:5000/#/")
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))

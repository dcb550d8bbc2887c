"""The tracking store and the disk fail for real while a run records itself: nothing is lost, nothing is there twice."""

# promise: stores that fail, hang, lock, fill up, lose answers

import io
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import rich.console
from mlflow import MlflowClient
from mlflow.entities import Run, ViewType
from stores import Proxy, Server

from pipeline.drive.recorded_run import artifact, open_trial, recorded
from pipeline.errors import ResourceError, UsageError
from pipeline.experiment.load import load
from pipeline.plan.plan import Plan, make_plan
from pipeline.plan.resources import Resources
from pipeline.protocol.events import ArtifactSaved, Metrics, Point, RunClosed
from pipeline.protocol.trial import Status
from pipeline.record import journal
from pipeline.record.folder import read_state
from pipeline.record.recorder import Recorder
from pipeline.record.screen import Terminal
from pipeline.tracking import mlflow as entities
from pipeline.tracking.follow import sync
from pipeline.tracking.loggers import scalars

MLP = Path(__file__).parents[3] / "experiments" / "mlp.yaml"
DOWN, UP = "doesn't accept results (", "accepts results again"
NO_FILES, FILES = "doesn't accept files (", "accepts files again"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def proxy(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "3")  # of a server that hangs; ours is 30 seconds
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with Proxy(server) as proxy:
        yield proxy


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    path = tmp_path / "disk"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", path], check=True)
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)


def plan_of(uri: str, directory: Path) -> Plan:
    overrides = [f"tracking.uri={uri}", f"tracking.directory={directory}"]
    overrides += ["parallel.launcher=inprocess", "parallel.workers=1", "parallel.strategy=single"]
    return make_plan(load(MLP, overrides).experiment, Resources(cpus=2, memory_mb=4096), with_baseline=False)


class Training:
    """Sends what training sends, from step 1 on, one event in some milliseconds."""

    def __init__(self, plan: Plan, recorder: Recorder, *, shown: io.StringIO, steps: int = 0) -> None:
        self.recorder = recorder
        self._shown = shown
        self.steps = steps
        self.longest_s = 0.0  # The longest that an event was held up
        open_trial(plan.main, recorder)

    def step(self) -> None:
        self.steps += 1
        points = (Point("train/loss", self.steps, 1 / self.steps), Point("train/learning_rate", self.steps, 0.1))
        begin = time.monotonic()
        self.recorder.receive(Metrics(step=self.steps, epoch=1, points=points))
        self.longest_s = max(self.longest_s, time.monotonic() - begin)
        time.sleep(0.003)

    def set_step(self, *, steps: int = 100) -> None:
        for _ in range(steps):
            self.step()

    def until(self, condition: Callable[[], bool]) -> None:
        """Train until something has happened, and at least some steps more."""
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, self._shown.getvalue()
            self.set_step(steps=20)
        self.set_step(steps=50)


class Recording:
    """A recorded run in this process, and what its terminal shows."""

    def __init__(self, uri: str, directory: Path) -> None:
        self.plan = plan_of(uri, directory)
        self.directory = directory
        self._terminal = io.StringIO()

    @contextmanager
    def training(self, folder: Path | None = None, *, steps: int = 0) -> Iterator[Training]:
        terminal = Terminal.on(rich.console.Console(file=self._terminal, width=1000))
        with recorded(self.plan, terminal=terminal, folder=folder) as recorder:
            yield Training(self.plan, recorder, shown=self._terminal, steps=steps)

    @property
    def shown(self) -> str:
        return self._terminal.getvalue()

    @property
    def folder(self) -> Path:
        (folder,) = self.directory.iterdir()
        return folder

    def says(self, text: str) -> Callable[[], bool]:
        return lambda: text in self.shown

    def assert_told_once(self, *texts: str) -> None:
        assert [self.shown.count(text) for text in texts] == [1] * len(texts), self.shown
        assert [self.shown.index(text) for text in texts] == sorted(self.shown.index(text) for text in texts)


def runs_of(client: MlflowClient, folder: Path) -> list[Run]:
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    where = f"tags.`pipeline.run` = '{folder.name}'"
    return list(client.search_runs(experiments, filter_string=where, run_view_type=ViewType.ACTIVE_ONLY))


def only_run(client: MlflowClient, folder: Path) -> Run:
    (run,) = runs_of(client, folder)
    return run


def assert_all_is_there(uri: str, folder: Path, *, status: Status = "FINISHED", steps: int = 0) -> None:
    """MLflow has every point of the journal, and each once; every file; and the right status."""
    client = MlflowClient(uri)
    run = only_run(client, folder)
    events = list(journal.read(folder / journal.FILE_NAME))
    expected: dict[str, list[tuple[int, float]]] = {}
    for event in events:
        for metric in entities.metrics(scalars(event), timestamp=entities.milliseconds(event)):
            expected.setdefault(metric.key, []).append((metric.step, metric.value))
    if steps:
        assert [step for step, _ in expected["train/loss"]] == list(range(1, steps + 1))
    for name, points in expected.items():
        history = client.get_metric_history(run.info.run_id, name)
        assert sorted((point.step, point.value) for point in history) == sorted(points), name
    files = {event.path for event in events if isinstance(event, ArtifactSaved)}
    assert {entry.path for entry in client.list_artifacts(run.info.run_id)} == files
    assert run.info.status == status


class Bad(NamedTuple):
    """What befalls the requests to the store while a run goes on."""

    fault: Any
    where: str = ""
    down: str = DOWN
    up: str = UP


BAD_DAYS = {
    "500s": Bad("fails"),
    "hangs": Bad("hangs"),
    "loses its answers": Bad("loses answers"),
    "files are refused": Bad("fails", "/mlflow-artifacts/", NO_FILES, FILES),
    "files hang": Bad("hangs", "/mlflow-artifacts/", NO_FILES, FILES),
}


@pytest.mark.parametrize("bad", BAD_DAYS.values(), ids=BAD_DAYS)
def test_a_store_that_fails_for_a_while(proxy: Proxy, tmp_path: Path, bad: Bad) -> None:
    run = Recording(proxy.uri, tmp_path)
    with run.training() as training:
        training.until(lambda: "train/loss" in metrics_of(proxy, run.folder))
        proxy.fault, proxy.where = bad.fault, bad.where
        (run.folder / "more.txt").write_text("more")
        artifact("more.txt", training.recorder)
        training.until(run.says(bad.down))
        if bad.where:  # results don't wait for files
            latest = training.steps
            training.until(lambda: metrics_of(proxy, run.folder)["train/loss"] < 1 / latest)
        proxy.fault = ""
        training.until(run.says(bad.up))

    assert proxy.struck
    assert training.longest_s < 1  # the store was silent for seconds
    run.assert_told_once(bad.down, bad.up)
    assert_all_is_there(proxy.uri, run.folder, steps=training.steps)


def metrics_of(proxy: Proxy, folder: Path) -> dict[str, float]:
    found = runs_of(MlflowClient(f"http://{proxy.target.netloc}"), folder)
    return dict(found[0].data.metrics) if found else {}


def test_a_store_that_creates_runs_without_saying_so_has_one_in_the_end(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow's client asks a second time when it isn't answered."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    proxy.fault, proxy.where = "loses answers", "/runs/create"
    run = Recording(proxy.uri, tmp_path)
    with run.training() as training:
        training.until(run.says(DOWN))
        proxy.fault = ""
        training.until(run.says(UP))

    assert proxy.struck == 2
    run.assert_told_once(DOWN, UP)
    assert_all_is_there(proxy.uri, run.folder, steps=training.steps)


def test_a_slow_store_slows_nothing_down(proxy: Proxy, tmp_path: Path) -> None:
    proxy.fault = "slow"
    run = Recording(proxy.uri, tmp_path)
    with run.training() as training:
        training.until(lambda: proxy.struck >= 5)
        proxy.delay_s = 0.2  # so that the test ends some day

    assert training.longest_s < 0.5  # half of the time that each of its answers takes
    assert "takes no" not in run.shown
    assert_all_is_there(proxy.uri, run.folder, steps=training.steps)


def test_a_server_that_is_down_at_the_start_and_killed_in_the_middle(server: Server, tmp_path: Path) -> None:
    run = Recording(server.uri, tmp_path)
    server.kill()
    try:
        with run.training() as training:
            training.until(run.says(DOWN))
            server.start()
            training.until(run.says(UP))
            server.kill()
            training.until(lambda: run.shown.count(DOWN) == 2)
            server.start()
            training.until(lambda: run.shown.count(UP) == 2)
    finally:
        if not server.process:
            server.start()

    assert "doesn't answer" in run.shown  # before anything began
    assert (run.shown.count(DOWN), run.shown.count(UP)) == (2, 2)
    assert_all_is_there(server.uri, run.folder, steps=training.steps)


def test_a_database_that_another_process_has_locked(tmp_path: Path) -> None:
    """MLflow waits 20 seconds for a lock; training doesn't wait for MLflow."""
    path = tmp_path / "mlflow.db"
    run = Recording(f"sqlite:///{path}", tmp_path / "runs")
    with run.training() as training:
        training.until(lambda: path.exists() and has_runs(path))
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            before = training.steps
            training.set_step(steps=500)
            other.execute("ROLLBACK")

    assert training.steps == before + 500
    assert training.longest_s < 1  # the lock was held for two
    assert_all_is_there(f"sqlite:///{path}", run.folder, steps=training.steps)


def has_runs(path: Path) -> bool:
    with closing(sqlite3.connect(path)) as database, suppress(sqlite3.OperationalError):
        return bool(database.execute("SELECT count(*) FROM runs").fetchone()[0])
    return False


def fill(disk: Path) -> None:
    with (disk / "ballast").open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
            file.flush()


def test_a_disk_without_room_for_artifacts(small_disk: Path, tmp_path: Path) -> None:
    (tmp_path / "mlartifacts").symlink_to(small_disk)
    run = Recording(f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "runs")
    fill(small_disk)
    with run.training() as training:
        training.until(run.says(NO_FILES))
        (small_disk / "ballast").unlink()
        training.until(run.says(FILES))

    run.assert_told_once(NO_FILES, FILES)
    assert_all_is_there(f"sqlite:///{tmp_path}/mlflow.db", run.folder, steps=training.steps)


def test_a_full_disk_ends_a_run_that_is_continued_once_there_is_room(proxy: Proxy, small_disk: Path) -> None:
    run = Recording(proxy.uri, small_disk / "runs")

    def train() -> None:
        with run.training() as training:
            training.set_step()
            fill(small_disk)
            training.until(lambda: False)

    with pytest.raises(
        ResourceError, match=r"events.jsonl: the disk is full\. Free some space and use --resume"
    ) as raised:
        train()

    assert raised.value.exit_code == 3
    run.assert_told_once("the end of the run is not recorded in")
    recorded = [event for event in journal.read(run.folder / journal.FILE_NAME) if isinstance(event, Metrics)]
    mlflow_run = only_run(client := MlflowClient(proxy.uri), run.folder)
    steps = sorted(point.step for point in client.get_metric_history(mlflow_run.info.run_id, "train/loss"))
    assert steps == [event.step for event in recorded]
    assert mlflow_run.info.status == "FAILED"
    assert "the disk is full" in mlflow_run.data.tags["mlflow.note.content"]

    (small_disk / "ballast").unlink()
    with run.training(run.folder, steps=len(steps)) as training:
        training.set_step()
    assert_all_is_there(proxy.uri, run.folder, steps=training.steps)


def test_a_full_disk_is_found_before_training(command: Any, small_disk: Path, tmp_path: Path) -> None:
    fill(small_disk)
    more = (f"tracking.uri=sqlite:///{tmp_path}/mlflow.db", f"tracking.directory={small_disk}/runs")
    ended = command("run", "lab.yaml", "--no-baseline", *more)

    assert ended.code == 3
    assert "the disk is full. Free some space" in ended.stderr
    assert "Traceback" not in ended.output
    assert ": step" not in ended.stderr


def test_a_file_that_does_not_fit_is_an_error_with_its_name(small_disk: Path) -> None:
    run = Recording("sqlite:///unused.db", small_disk / "runs")
    with (
        pytest.raises(ResourceError, match=r"the disk is full\. Free some space"),
        recorded(run.plan, terminal=Terminal.on(rich.console.Console(file=io.StringIO())), tracked=False),
    ):
        (run.folder / "report.html").write_bytes(bytes(2**21))


def test_a_folder_that_is_deleted_under_way(proxy: Proxy, tmp_path: Path) -> None:
    run = Recording(proxy.uri, tmp_path)
    gone: list[Path] = []

    def train() -> None:
        with run.training() as training:
            gone.append(run.folder)
            training.until(lambda: "train/loss" in metrics_of(proxy, gone[0]))
            shutil.rmtree(gone[0])
            training.set_step()

    with pytest.raises(ResourceError, match="was deleted during the run, so the run was stopped"):
        train()

    client = MlflowClient(proxy.uri)
    history = client.get_metric_history(only_run(client, gone[0]).info.run_id, "train/loss")
    assert sorted(point.step for point in history) == list(range(1, len(history) + 1))


SECRET = "pl4nted-passw0rd"


def test_a_password_is_in_no_file_and_sync_takes_it_from_the_environment(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with_password = proxy.uri.replace("://", f"://me:{SECRET}@")
    run = Recording(with_password, tmp_path)
    with run.training() as training:
        proxy.password = SECRET
        training.until(lambda: "train/loss" in metrics_of(proxy, run.folder))
        proxy.fault = "fails"
        training.until(run.says(DOWN))
        training.set_step()
    proxy.fault = ""

    assert "Send the rest with: pipeline sync" in run.shown
    texts = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    assert run.folder / journal.FILE_NAME in texts
    assert [path for path, text in texts.items() if SECRET.encode() in text] == []
    assert SECRET not in run.shown
    refused = sync(run.folder, warn=[].append)
    assert "MLFLOW_TRACKING_PASSWORD" in refused.message
    monkeypatch.setenv("MLFLOW_TRACKING_URI", with_password)
    assert sync(run.folder, warn=[].append).delivered
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", SECRET)
    assert sync(run.folder, warn=[].append).delivered
    assert_all_is_there(proxy.uri, run.folder, steps=training.steps)


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = [sys.argv[1], str(Path(sys.argv[1]).parents[1] / "support")]
from test_outages import Recording

run = Recording(sys.argv[2], Path(sys.argv[3]))
with run.training() as training:
    training.until(run.says("doesn't accept results ("))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_driver_is_continued_without_gaps_and_double_points(proxy: Proxy, tmp_path: Path) -> None:
    proxy.fault, proxy.where = "fails", "/runs/log-batch"
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(Path(__file__).parent), proxy.uri, str(tmp_path)], check=False
    )
    assert killed.returncode == -signal.SIGKILL
    proxy.fault = ""
    run = Recording(proxy.uri, tmp_path)
    before = list(journal.read(run.folder / journal.FILE_NAME))
    with (run.folder / journal.FILE_NAME).open("ab") as file:
        file.write(b'{"kind":"metrics","ti')  # what a killed driver may leave

    state = read_state(run.folder)
    assert (state.status, state.experiment, state.opened) == ("KILLED", run.plan.experiment, before[0])
    with run.training(run.folder, steps=30) as training:  # from a checkpoint at step 30
        assert read_state(run.folder).status == "RUNNING"
        with pytest.raises(UsageError, match="still running"), run.training(run.folder):
            pass
        training.set_step(steps=len(before) + 100)

    assert read_state(run.folder).status == "FINISHED"
    assert_all_is_there(proxy.uri, run.folder, steps=training.steps)
    assert sync(run.folder, warn=[].append).delivered  # a replay of a continued run adds nothing
    assert_all_is_there(proxy.uri, run.folder, steps=training.steps)


def test_the_end_of_a_run_does_not_wait_for_ever(proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.tracking.follower._DRAIN_SECONDS", 2.0)
    monkeypatch.setattr("pipeline.tracking.follower._SILENT_SECONDS", 0.5)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    run = Recording(proxy.uri, tmp_path)
    with run.training() as training:
        training.until(lambda: "train/loss" in metrics_of(proxy, run.folder))
        proxy.fault = "hangs"
        training.until(lambda: proxy.struck > 0)
        begin = time.monotonic()

    assert time.monotonic() - begin < 10  # two, and a request takes 20
    run.assert_told_once("waiting until everything is in MLflow", f"Send the rest with: pipeline sync {run.folder}")
    proxy.fault = ""
    assert sync(run.folder, warn=[].append).delivered
    assert_all_is_there(proxy.uri, run.folder, steps=training.steps)


def test_ctrl_c_ends_the_wait_for_a_store_that_hangs(proxy: Proxy, project: Path, tmp_path: Path, start: Any) -> None:
    """A whole run, whose files hang at its end."""
    proxy.fault, proxy.where = "hangs", "/mlflow-artifacts/"
    more = [f"tracking.uri={proxy.uri}", f"tracking.directory={tmp_path}"]
    environment = {**os.environ, "MLFLOW_HTTP_REQUEST_TIMEOUT": "300"}
    process = start("run", "lab.yaml", "--no-baseline", *more, cwd=project, env=environment)
    shown = ""
    while "waiting until everything is in MLflow" not in shown:
        line = process.stderr.readline()
        assert line, shown + process.stdout.read()
        shown += line
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=20)

    (folder,) = tmp_path.iterdir()
    assert process.returncode == 130, stdout + stderr
    assert f"Send the rest with: pipeline sync {folder}" in stderr, stderr
    assert "Traceback" not in stdout + stderr
    assert isinstance(journal.ending(folder / journal.FILE_NAME), RunClosed)
    proxy.fault = ""
    assert sync(folder, warn=[].append).delivered
    assert_all_is_there(proxy.uri, folder)


def test_a_whole_run_while_the_store_is_out_of_order(proxy: Proxy, tmp_path: Path, start: Any) -> None:
    """The server is out of order when it begins."""
    proxy.fault = "fails"
    more = ["--no-baseline", f"tracking.uri={proxy.uri}", f"tracking.directory={tmp_path}", "train.epochs=4"]
    more += ["parallel.launcher=inprocess", "parallel.workers=1"]
    process = start("run", MLP, *more, cwd=tmp_path.parent)
    shown = ""
    for line in process.stderr:
        shown += line
        if DOWN in line:
            proxy.fault = ""

    assert process.wait(60) == 0, shown + process.stdout.read()
    assert shown.count(DOWN) == shown.count(UP) == 1
    (folder,) = tmp_path.iterdir()
    assert_all_is_there(proxy.uri, folder)

"""Recorded runs and what they are fed to; see tests/system/replay/README.md."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from filelock import FileLock
from job import Recording

from pipeline.protocol.events import AnyEvent, RunClosed
from pipeline.record.journal import FILE_NAME, read
from pipeline.tracking.follow import Delivery
from pipeline.tracking.store import TrackingOutcome

if TYPE_CHECKING:  # importing MLflow takes seconds, which tests without a store needn't spend
    from mlflow import MlflowClient
    from mlflow.entities import Run

TESTS = Path(__file__).parents[1]
JOURNALS = TESTS / "journals"
LAB = "/home/user/lab"  # What stands in the recordings for the folder in which they were made
_BINARY = (".npy", ".pt", ".safetensors")


class Store(NamedTuple):
    """An MLflow store."""

    uri: str

    @property
    def client(self) -> "MlflowClient":
        from mlflow import MlflowClient

        return MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)

    def runs(self, experiment: str) -> "list[Run]":
        found = self.client.get_experiment_by_name(experiment)
        return list(self.client.search_runs([found.experiment_id])) if found else []

    def series(self, run: "Run", name: str) -> list[tuple[int, float]]:
        history = self.client.get_metric_history(run.info.run_id, name)
        return sorted((point.step, point.value) for point in history)

    def contents(self, experiment: str) -> dict[str, object]:
        """All that sending something twice could double, by run."""
        return {run.info.run_id: self._contents(run) for run in self.runs(experiment)}

    def _contents(self, run: "Run") -> tuple[object, ...]:
        history = {name: self.client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
        return (
            {name: sorted((p.step, p.timestamp, str(p.value)) for p in points) for name, points in history.items()},
            run.data.params,
            run.data.tags,
            (run.info.run_name, run.info.status, run.info.start_time, run.info.end_time),
            [(given.dataset.name, given.dataset.digest) for given in run.inputs.dataset_inputs],
            [output.model_id for output in run.outputs.model_outputs],
            sorted(entry.path for entry in self.client.list_artifacts(run.info.run_id)),
        )


def recording(name: str, *, lab: Path) -> Recording:
    """A copy of a recorded run as if it had been made in the folder ``lab``."""
    source = JOURNALS / name
    opened: Any = next(read(source / FILE_NAME))
    folder = lab / "runs" / str(opened.run)
    if not folder.exists():
        shutil.copytree(source, folder)
        for path in folder.rglob("*"):
            if path.is_file() and path.suffix not in _BINARY and LAB.encode() in (text := path.read_bytes()):
                path.write_bytes(text.replace(LAB.encode(), str(lab).encode()))
    return Recording(folder)


def copied(store: Path, lab: Path) -> Store:
    """A copy of the store in that folder, as the store of the folder ``lab``."""
    for path in store.iterdir():
        shutil.copy(path, lab)
    return Store(f"sqlite:///{lab}/mlflow.db")


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a user, which a test is in: ``runs``, and ``mlflow.db`` if it asks for a store."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def journal(lab: Path) -> Callable[[str], Recording]:
    """Copies of recorded runs, by name: ``journal("finished")``."""
    return lambda name: recording(name, lab=lab)


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow store without runs. Creating it takes seconds: once for all processes of a test session."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "empty-store"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            partial = folder.with_suffix(".partial")
            partial.mkdir()
            Store(f"sqlite:///{partial}/mlflow.db").client.search_experiments()
            partial.rename(folder)
    return folder


@pytest.fixture
def store(lab: Path, empty_store: Path) -> Store:
    """A new store, which the recorded runs of this test belong to."""
    return copied(empty_store, lab)


@pytest.fixture
def play(lab: Path, store: Store, command: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """``play("finished", "run", FILE, ...)``: the command, whose workers say what was recorded, see player.py.

    It is in a user's project with ``tiny.yaml`` and ``lab.yaml`` and writes to `store`, in this process and without the
    model.
    """
    shutil.copytree(TESTS / "project", lab, dirs_exist_ok=True)
    shutil.copy(JOURNALS / "tiny.yaml", lab)
    monkeypatch.chdir(lab)
    monkeypatch.syspath_prepend(TESTS / "system" / "replay" / "player")

    def run(name: str, *arguments: str) -> Any:
        monkeypatch.setenv("PLAYED", str(JOURNALS / name))
        with written_here():
            return command(*arguments, "parallel.launcher=player", "tracking.log_model=false")

    yield run
    sys.modules.pop("player", None)


@contextmanager
def written_here() -> Iterator[None]:
    """Inside, commands write to MLflow in this process: another one takes seconds to import it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.drive.recorded_run.Follower", _WriterHere)
        yield


class _WriterHere:
    """What the process of `pipeline.tracking.follow` does, at once and in this one."""

    late: tuple[str, ...] = ()

    def __init__(self, folder: Path, *, uri: str, warn: Callable[[str], None], **_: Any) -> None:
        self._delivery = delivery(folder, uri=uri, warn=warn)

    def receive(self, event: AnyEvent) -> None:
        """Other events are in the journal."""
        self._delivery.end = event if isinstance(event, RunClosed) else self._delivery.end

    def finish(self, timeout_s: float) -> bool:
        self._delivery.ending.set()
        self._delivery.send()
        return True

    def close(self) -> TrackingOutcome:
        return self._delivery.sent


def delivery(folder: Path, *, uri: str, warn: Callable[[str], None]) -> Delivery:
    """The delivery of a run that goes on from what is kept in its folder."""
    return Delivery(folder, uri=uri, sent=TrackingOutcome.read(folder) or TrackingOutcome(), warn=warn)

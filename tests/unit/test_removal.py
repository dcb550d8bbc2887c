"""``pipeline remove``: which runs it means, and that a running one is never removed."""

# promise: `remove` deletes only what is meant: never a running run, a sweep with its trials, MLflow's runs restorably

from contextlib import closing
from pathlib import Path

import mlflow  # noqa: F401 - its import starts uname, and a test may start no process
import pytest
from samples import finished, spread

from pipeline.commands import remove as removal
from pipeline.errors import ResourceError, UsageError
from pipeline.protocol.events import RunClosed, RunOpened
from pipeline.protocol.trial import Status
from pipeline.record.folder import is_listed
from pipeline.record.recorder import Recorder


def run(directory: Path, name: str, *, status: Status = "FINISHED", lab: str = "lab") -> Path:
    folder = directory / name
    folder.mkdir(parents=True)
    opened = RunOpened(
        time=1.7e9, run=name, tracking_uri="", tracking_experiment=lab, tags={"role": "main"}, params={"name": lab},
        trials=("main",),
    )  # fmt: skip
    with closing(Recorder(folder, subscribers=[])) as recorder:
        recorder.receive(opened)
        recorder.receive(finished("main", spread(1)))
        recorder.receive(RunClosed(time=1.7e9 + 5, status=status))
    return folder


def failed(directory: Path) -> list[str]:
    return [folder.name for folder in removal.choose_failed(directory)]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name, status in {"1": "FINISHED", "2": "FAILED", "3": "FAILED", "4": "KILLED"}.items():
        run(tmp_path, name, status=status)  # type: ignore[arg-type]
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "events.jsonl").touch()  # it failed before it started
    return tmp_path


def test_a_running_run_is_never_removed(runs: Path) -> None:
    meant = removal.choose_failed(runs)
    with closing(Recorder(runs / "3", subscribers=[])):  # it was resumed after the question
        assert failed(runs) == ["2", "7"]
        with pytest.raises(UsageError, match="3: this run is running, so it is not removed"):
            removal.choose_named(["3"], runs)
        with pytest.raises(UsageError, match="3: this run is running"):
            next(removal.delete(meant, keep_mlflow=True))
        assert is_listed(runs / "3")
    assert is_listed(runs / "2")


def test_weights_stay_though_the_journal_is_damaged(runs: Path) -> None:
    (runs / "7" / "model").mkdir()
    (runs / "7" / "model" / "weights.pt").touch()
    assert failed(runs) == ["2", "3"]


def test_a_sweep_is_removed_as_a_whole(runs: Path) -> None:
    sweep = run(runs, "8")
    trial = run(sweep, "trial-001")
    with pytest.raises(UsageError, match=r"trial-001 of 8 is a trial\. Remove the whole: pipeline remove 8"):
        removal.choose_named(["8/trial-001"], runs)
    with closing(Recorder(trial, subscribers=[])), pytest.raises(UsageError, match="8: this run is running"):
        removal.choose_named(["8"], runs)
    chosen = removal.choose_named(["8", str(sweep)], runs)
    assert list(removal.delete(chosen, keep_mlflow=True)) == [sweep]
    assert not sweep.exists()


def in_store(folder: Path, uri: str) -> None:
    removal.TrackingOutcome(run_id="a", experiment_id="1", delivered=True, uri=uri).keep(folder)


def test_of_a_link_only_the_link_is_removed(runs: Path) -> None:
    for name in ("1", "2"):
        (runs / f"link-{name}").symlink_to(runs / name, target_is_directory=True)
    assert failed(runs) == ["2", "3", "7"]
    in_store(runs / "1", f"sqlite:///{runs}/away.db")
    assert list(removal.delete(removal.choose_named(["link-1"], runs), keep_mlflow=False)) == [runs / "link-1"]
    assert not (runs / "link-1").is_symlink()
    assert is_listed(runs / "1")


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("sqlite:////no/away.db", r"store .*away\.db is not there, so no folder is removed\. To delete"),
        ("http://localhost:9", r"no answer .*\), so no folder is removed\. .* use --keep-mlflow"),
    ],
)
def test_all_folders_stay_if_the_store_of_one_is_not_there_or_refuses(
    runs: Path, uri: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("no answer of http://me:secret@host/mlflow")

    in_store(runs / "1", uri)
    monkeypatch.setattr(removal, "delete_runs", refuse)
    chosen = removal.choose_named(["2", "1"], runs)
    with pytest.raises(ResourceError, match=said) as refused:
        list(removal.delete(chosen, keep_mlflow=False))
    assert "secret" not in str(refused.value)
    assert (runs / "1").is_dir()
    assert (runs / "2").is_dir()
    assert len(list(removal.delete(chosen, keep_mlflow=True))) == 2


def test_an_empty_name_is_no_run(tmp_path: Path) -> None:
    run(tmp_path, "1")
    with pytest.raises(UsageError, match="the name of a run is empty"):
        removal.choose_named(["1", ""], tmp_path)

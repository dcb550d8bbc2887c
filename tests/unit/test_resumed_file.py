"""Files with the same ``name:`` are told apart where one of them goes on with its newest run."""

from contextlib import closing
from pathlib import Path

import pytest

from pipeline.config.load import ExperimentFile, load
from pipeline.driver import resume
from pipeline.errors import UsageError
from pipeline.protocol.events import RunOpened
from pipeline.recording.folder import RunState
from pipeline.recording.recorder import Recorder

FILE = """\
name: same
model: {_target_: torch.nn.Linear, in_features: 4, out_features: 2}
data: {_target_: pipeline.data.digits}
loss: {_target_: torch.nn.CrossEntropyLoss}
optimizer: {_target_: torch.optim.SGD, lr: 0.1}
train: {epochs: 4, global_batch_size: 16}
"""


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def experiment(name: str) -> ExperimentFile:
    Path(name).write_text(FILE)
    return load(name)


def run(hour: int, file: str, *, role: str = "main") -> Path:
    folder = Path("runs", f"20260301-{hour:02}0000-same-aaaa")
    folder.mkdir(parents=True)
    with closing(Recorder(folder, subscribers=[])) as recorder:
        recorder.receive(opened(file, role=role))
    return folder


def opened(file: str, *, role: str = "main") -> RunOpened:
    return RunOpened(
        time=0, run="r", tracking_uri="", tracking_experiment="same", tags={"role": role}, params={"name": "same"},
        trials=("main",), file=file,
    )  # fmt: skip


def test_each_file_goes_on_with_its_own_run() -> None:
    a, b = experiment("a.yaml"), experiment("b.yaml")
    assert resume.newest(a) is None
    first = run(10, "a.yaml")
    second = run(11, "b.yaml")
    run(12, "b.yaml", role="sweep")
    assert resume.newest(a) == first
    assert resume.newest(load(Path("a.yaml").resolve())) == first
    assert resume.newest(b) == second


def test_a_run_of_another_file_is_refused_by_name() -> None:
    a = experiment("a.yaml")
    experiment("b.yaml")
    other = run(10, "b.yaml")
    with pytest.raises(UsageError) as caught:
        resume.newest(a)
    assert f"{other} is a run of b.yaml, which has the same name: same, as a.yaml" in str(caught.value)
    assert str(caught.value).endswith(f"--resume {other.name}")


@pytest.mark.parametrize("source", ["renamed.yaml", ""])
def test_a_renamed_file_and_a_run_of_an_earlier_version_go_on(source: str) -> None:
    a = experiment("a.yaml")
    folder = run(10, source)
    assert resume.newest(a) == folder


@pytest.mark.parametrize(("source", "notes"), [("a.yaml", 0), ("", 0), ("b.yaml", 1)])
def test_another_file_is_told(source: str, notes: int) -> None:
    a = experiment("a.yaml")
    state = RunState(folder=Path("runs/r"), experiment=a.experiment, opened=opened(source), status="KILLED")
    told = resume.changes(a, state, allowed=False)
    assert told == ["r was started with b.yaml, not with a.yaml"] * notes

"""Files with the same ``name:`` are told apart where one of them goes on with its newest run."""

# promise: `latest` and `--resume` never take an older run in silence

from contextlib import closing
from pathlib import Path

import pytest

from pipeline.drive import resume
from pipeline.errors import ExperimentError, UsageError
from pipeline.experiment.load import ExperimentFile, load
from pipeline.protocol.events import Metrics, RunClosed, RunOpened
from pipeline.protocol.trial import Status
from pipeline.record.folder import RunState
from pipeline.record.recorder import Recorder
from pipeline.results import record

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


def run(
    hour: int, file: str, *, role: str = "main", status: Status | None = None, quick: bool = False, steps: int = 1
) -> Path:
    folder = Path("runs", f"20260301-{hour:02}0000-same-aaaa")
    folder.mkdir(parents=True)
    with closing(Recorder(folder, subscribers=[])) as recorder:
        recorder.receive(opened(file, role=role, quick=quick))
        if steps:
            recorder.receive(Metrics(time=1, step=steps, epoch=1, points=()))
        if status is not None:
            recorder.receive(RunClosed(time=2, status=status))
    return folder


def opened(file: str, *, role: str = "main", quick: bool = False) -> RunOpened:
    return RunOpened(
        time=0, run="r", tracking_uri="", tracking_experiment="same", params={"name": "same"}, trials=("main",),
        file=file, tags={"role": role, **({"quick": "true"} if quick else {})},
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


def test_the_newest_run_goes_on_that_did_not_complete_and_was_not_quick() -> None:
    a = experiment("a.yaml")
    run(7, "a.yaml", status="FAILED", steps=0)
    run(8, "a.yaml", steps=2, quick=True)
    with pytest.raises(UsageError, match=r"has no run of same that has made a step\. Start one without --resume"):
        resume.earlier(a, "latest")
    run(9, "a.yaml", steps=2, status="FINISHED")
    finished = run(10, "a.yaml", steps=2, status="FINISHED")
    run(11, "a.yaml", status="FAILED", steps=0)
    assert resume.newest(a) == finished

    failed = run(12, "a.yaml", steps=2, status="FAILED")
    run(13, "a.yaml", steps=2, status="FINISHED")
    run(14, "a.yaml", steps=2, status="KILLED", quick=True)
    assert resume.newest(a) == failed

    killed = run(15, "a.yaml", steps=2)
    assert resume.newest(a) == killed


def test_a_run_with_a_damaged_journal_is_left_out_with_one_warning(capsys: pytest.CaptureFixture[str]) -> None:
    a = experiment("a.yaml")
    whole, damaged = run(10, "a.yaml"), run(11, "a.yaml")
    events = damaged / "events.jsonl"
    events.write_bytes(b"\0" * 40 + events.read_bytes())
    assert resume.newest(a) == resume.newest(a) == whole
    assert capsys.readouterr().err == (
        f"warning: not used: {events}:1: this line is damaged. "
        f"Remove the run: pipeline remove {damaged} --keep-mlflow\n"
    )


def test_a_run_of_another_file_is_refused_by_name() -> None:
    a = experiment("a.yaml")
    experiment("b.yaml")
    other = run(10, "b.yaml")
    with pytest.raises(UsageError) as caught:
        resume.newest(a)
    assert f"the latest run named same is {other}. It was started with b.yaml, not with a.yaml" in str(caught.value)
    assert str(caught.value).endswith(f"--resume {other.name}.")


@pytest.mark.parametrize("source", ["renamed.yaml", ""])
def test_a_renamed_file_goes_on(source: str) -> None:
    a = experiment("a.yaml")
    folder = run(10, source)
    assert resume.newest(a) == folder


@pytest.mark.parametrize(("source", "notes"), [("a.yaml", 0), ("", 0), ("b.yaml", 1)])
def test_another_file_is_told(source: str, notes: int) -> None:
    a = experiment("a.yaml")
    state = RunState(folder=Path("runs/r"), experiment=a.experiment, opened=opened(source), status="KILLED")
    assert resume.changes(a, state, allowed=False) == ["r was started with b.yaml, not with a.yaml"] * notes


def finished(text: str = FILE, *, status: Status = "FINISHED") -> RunState:
    Path("before.yaml").write_text(text)
    folder = Path("runs/r")
    (folder / "checkpoints" / "step-00000004").mkdir(parents=True, exist_ok=True)
    (folder / record.FILE_NAME).touch()
    return RunState(folder=folder, experiment=load("before.yaml").experiment, opened=opened(""), status=status)


def now(text: str = FILE, *, epochs: int = 6) -> ExperimentFile:
    Path("now.yaml").write_text(text.replace("epochs: 4", f"epochs: {epochs}"))
    return load("now.yaml")


def test_a_finished_run_goes_on_for_more_epochs_or_for_its_report() -> None:
    state = finished()
    resume._check_finished(now(), state)
    assert resume.changes(now(), state, allowed=False) == ["train.epochs was 4, is now 6"]
    for epochs in (4, 3):
        with pytest.raises(
            UsageError, match=r"has finished\. To continue it, train for more than 4 epochs, .* start a new run without"
        ):
            resume._check_finished(now(epochs=epochs), state)
    (state.folder / record.FILE_NAME).unlink()
    resume._check_finished(now(epochs=4), state)
    assert not resume.is_continued(now(epochs=4), state)
    (state.folder / "checkpoints" / "step-00000004").rmdir()
    with pytest.raises(UsageError, match=r"has no checkpoint\. Start a new run"):
        resume._check_finished(now(), state)


@pytest.mark.parametrize(
    ("old", "new", "note"),
    [
        ("epochs: 4,", "epochs: 4, cudnn_benchmark: true,", "train.cudnn_benchmark was false, is now true"),
        ("name: same", "name: same\nloader: {num_workers: 2}", "loader.num_workers was 0, is now 2"),
    ],
)
def test_what_does_not_shape_the_training_may_change(old: str, new: str, note: str) -> None:
    assert note in resume.changes(now(FILE.replace(old, new), epochs=4), finished(status="KILLED"), allowed=False)


def test_a_run_that_holds_the_value_of_a_variable_has_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    state = finished(FILE.replace("digits}", "digits, root: /data}"), status="KILLED")
    again = now(FILE.replace("digits}", "digits, root: '${oc.env:ROOT}'}"), epochs=4)
    monkeypatch.setenv("ROOT", "/data")
    assert resume.changes(again, state, allowed=False) == []
    monkeypatch.setenv("ROOT", "/other")
    with pytest.raises(ExperimentError, match=r"data\.root: is \$\{oc\.env:ROOT\}, but was /data"):
        resume.changes(again, state, allowed=False)


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize(
    ("old", "new", "key", "may"),
    [
        ("epochs: 4", "epochs: 3", "train.epochs", True),
        ("epochs: 4", "steps: 9, minutes: 2.0", "train.steps", True),
        ("lr: 0.1", "lr: 0.2", "optimizer.lr", True),
        ("digits}", "digits, root: /other}", "data.root", True),
        ("name: same", "name: same\nseed: 7", "seed", False),
        ("lr: 0.1", "lr: 0.1, momentum: 0.9", "optimizer.momentum", False),
        ("out_features: 2", "out_features: 3", "model.out_features", False),
        ("epochs: 4", "epochs: 8, clip_grad_norm: 1.0", "train.clip_grad_norm", False),
        ("global_batch_size: 16", "global_batch_size: 8", "train.global_batch_size", False),
        ("SGD", "AdamW", "optimizer._target_", False),
        ("epochs: 4", "epochs: 4, lr_scaling: {rule: linear, base_batch_size: 4}", "train.lr_scaling.rule", False),
        ("epochs: 4", "epochs: 4, ema: {decay: 0.5}", "train.ema.decay", False),
        ("name: same", "name: same\nscheduler: {_target_: torch.optim.lr_scheduler.ConstantLR}", "scheduler._target_",
         False),
    ],
)  # fmt: skip
def test_length_rate_and_data_may_change_if_allowed_and_nothing_else_that_shapes_the_training(
    old: str, new: str, key: str, may: bool, allowed: bool
) -> None:
    changed, state = now(FILE.replace(old, new), epochs=4), finished(status="KILLED")
    if may and allowed:
        assert any(note.startswith(f"{key} was ") for note in resume.changes(changed, state, allowed=True))
        return
    with pytest.raises(ExperimentError) as error:
        resume.changes(changed, state, allowed=allowed)
    (problem,) = [problem for problem in error.value.problems if problem.key == key]
    remedy = "add --allow-changed" if may else "start a new run without --resume"
    assert problem.message.endswith(f" in r. Set it back, or {remedy}.")


def test_what_differs_from_a_run_of_that_length_is_told() -> None:
    text = FILE + ("scheduler: {_target_: torch.optim.lr_scheduler.CosineAnnealingLR, T_max: '${total_steps}'}\n")
    (_, told) = resume.changes(now(text), finished(text), allowed=False)
    assert told.startswith(
        "scheduler.T_max: ${total_steps} follows from 6 epochs now. The steps before the checkpoint used the schedule "
    )


def test_early_stopping_that_has_more_patience_goes_on() -> None:
    before, patient = (FILE.replace("epochs: 4,", f"epochs: 4, early_stopping: {{patience: {n}}},") for n in (1, 2))
    resume._check_finished(now(patient, epochs=4), finished(before))
    assert len(resume.changes(now(patient, epochs=4), finished(before), allowed=False)) == 1

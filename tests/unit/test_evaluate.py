"""``pipeline evaluate``: which checkpoint and set, its values, what it tells, and a run that stays what it was."""

# promise: an older checkpoint is never the last in silence
# promise: `evaluate`: a checkpoint's values are the training's, at any world size; the run keeps status and duration

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import toys
from screens import check
from toy_runs import T0, toy_run

from pipeline.commands import evaluate as evaluating
from pipeline.commands.export import export_model
from pipeline.commands.export import make_result as make_export_result
from pipeline.commands.show import iter_evaluations
from pipeline.drive.checkpoints import Checkpoint, check_ended_training, choose
from pipeline.drive.resume import changes
from pipeline.errors import ExperimentError, TrainingError, UsageError
from pipeline.experiment.load import ExperimentFile, load
from pipeline.experiment.targets import BUILT_IN
from pipeline.protocol.events import Evaluated, Metrics, RunClosed, RunOpened, TrialOpened, Warned
from pipeline.protocol.trial import EVALUATION, Evaluation, Rank, Trial
from pipeline.record import journal
from pipeline.record.folder import read_state
from pipeline.record.recorder import Recorder
from pipeline.record.runs import summarize_run
from pipeline.results.record import Result
from pipeline.results.terminal import format_screen
from pipeline.train.restored import evaluate_checkpoint
from pipeline.train.storage import folder_name

ERROR = "metrics={error: {_target_: torchmetrics.regression.MeanAbsoluteError}}"
HIGHEST = {"best": "validation/loss", "mode": "max", "keep": 2}
"""Options that make the first epoch of a training that learns its best."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of three epochs, to steps 3, 6 and 9: the first is the best, the last two are kept."""
    lab: Path = tmp_path_factory.mktemp("lab")
    toy_run(lab, checkpoint=HIGHEST, data={"_target_": "toys.with_test"}, train={"epochs": 3})
    return lab


@pytest.fixture
def run(lab: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(lab)
    (folder,) = (lab / "runs").iterdir()
    return folder


def opened(folder: Path, *overrides: str) -> ExperimentFile:
    return load(folder / "experiment.yaml", overrides)


def chosen(folder: Path, wanted: str | None, *overrides: str) -> Checkpoint:
    return choose(opened(folder, *overrides), folder=folder, wanted=wanted, allowed=BUILT_IN)


def evaluated(folder: Path, step: int, **more: Any) -> Evaluated:
    experiment = more.pop("experiment", opened(folder).experiment)
    shared = {name: getattr(toys.trial(), name) for name in Trial.model_fields if name != "role"}
    shared |= {"name": EVALUATION, "experiment": experiment, **more}
    trial = Evaluation(**shared, checkpoints=str(folder / "checkpoints"), step=step)
    return evaluate_checkpoint(trial, rank=Rank(), outbox=toys.Kept())


def trained_values(folder: Path, name: str) -> dict[int, float]:
    events = (event for event in journal.read(folder / journal.FILE_NAME) if isinstance(event, Metrics))
    return {point.step: point.value for event in events for point in event.points if point.name == name}


# Which checkpoint


def test_the_result_is_the_default(run: Path) -> None:
    assert chosen(run, None).manifest.step == chosen(run, "best").manifest.step == 3
    assert chosen(run, None).best == "validation/loss"
    assert (chosen(run, "last").manifest.step, chosen(run, "last").best) == (9, "")
    assert chosen(run, None, "checkpoint.best=null").manifest.step == 9
    assert chosen(run, "6").manifest.step == chosen(run, folder_name(6)).manifest.step == 6


@pytest.mark.parametrize(
    ("wanted", "overrides", "said"),
    [
        ("5", (), "--checkpoint 5: {run} has no checkpoint of step 5. Its checkpoints: 3, 6, 9."),
        ("newest", (), "--checkpoint newest: not found. Use best, last, or a step: 3, 6, 9."),
        ("best", ("checkpoint.best=validation/error", ERROR), "a value of validation/error. Use --checkpoint last"),
        (None, ("checkpoint.directory=nowhere",), " has no complete checkpoint"),
        (None, ("checkpoint.directory=nowhere", "checkpoint.keep=0", "checkpoint.best=null"), "checkpoint.keep is 0"),
    ],
)
def test_a_checkpoint_that_there_is_not(run: Path, wanted: str | None, overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        chosen(run, wanted, *overrides)
    assert said.format(run=run.name) in str(caught.value)


def test_what_has_no_training_is_refused(run: Path) -> None:
    state = read_state(run)
    other = state.opened.model_copy(update={"tags": {"role": "benchmark"}})
    with pytest.raises(UsageError, match="a run of pipeline benchmark, which does not train"):
        check_ended_training(state.model_copy(update={"opened": other}), command="evaluate")


def test_a_run_that_goes_on_is_refused(run: Path) -> None:
    with closing(journal.Journal(run / journal.FILE_NAME)), pytest.raises(UsageError, match="is still running"):
        check_ended_training(read_state(run), command="evaluate")


# Its values


def test_the_values_are_those_of_the_training(run: Path) -> None:
    found = {step: evaluated(run, step, split="validation").values for step in (3, 6, 9)}
    assert {step: values["validation/loss"] for step, values in found.items()} == trained_values(run, "validation/loss")
    best = evaluated(run, 3, best="validation/loss")
    assert dict(best.values) == {"test/loss": trained_values(run, "test/loss")[3]}
    assert best.subject == "test set, 22 samples: weights of step 3 (epoch 1), the best validation/loss"
    assert best.checkpoint == str(run / "checkpoints" / folder_name(3))


@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"ema": {"decay": 0.5}}},
        {"model": {"_target_": "toys.batch_norm_net"}},
        {"loss": {"_target_": "toys.Uncertain"}},
        {"task": {"_target_": "toys.Logged"}, "loss": None},
        {"metrics": {"error": {"_target_": "torchmetrics.regression.MeanAbsoluteError"}}},
    ],
    ids=["averaged", "buffers", "learned loss", "logs", "metrics"],
)
def test_all_that_a_result_consists_of_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = toy_run(tmp_path, **sections)
    values = evaluated(folder, 6).values
    assert values == {name: trained_values(folder, name)[6] for name in values}
    assert "validation/loss" in values


@pytest.mark.parametrize(
    ("overrides", "split", "said"),
    [
        (["data._target_=toys.regression"], "test", "data: there is no test set to evaluate; use --split validation"),
        (["data={_target_: toys.regression, validation: 0}"], None, "data: there is no test or validation set to eval"),
        (["model={_target_: toys.wide_net}"], None, "model: doesn't match its state in the checkpoint"),
    ],
)
def test_what_does_not_fit_is_refused(run: Path, overrides: list[str], split: Any, said: str) -> None:
    with pytest.raises(ExperimentError, match=said):
        evaluated(run, 9, experiment=opened(run, *overrides).experiment, split=split)


def test_a_damaged_checkpoint_is_told(run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run, tmp_path / run.name)
    (folder / "checkpoints" / folder_name(6) / "state.pt").write_bytes(b"")
    with pytest.raises(TrainingError, match=r"state.pt has 0 bytes .*; set --checkpoint to another step"):
        evaluated(folder, 6)


# What is told


def test_changes_of_what_is_evaluated_are_told(run: Path) -> None:
    state = read_state(run)
    file = opened(run, "data={_target_: toys.regression}", "train.clip_grad_norm=7.0", "train.log_every_steps=7")
    plan = evaluating.make(file, state=state, checkpoint="6", split=None)
    (trial,) = plan.trials
    assert isinstance(trial, Evaluation)
    assert (trial.step, trial.split, trial.best) == (6, None, "")
    assert trial.changes == (
        "data._target_ was toys.with_test, is now toys.regression", "train.clip_grad_norm was null, is now 7.0"
    )  # fmt: skip
    assert plan.notes == ()  # the result has them, see below


def test_other_data_than_the_runs_is_refused_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By evaluate and export as by --resume, with one function: whatever reads data asks."""
    monkeypatch.chdir(tmp_path)
    folder, regression = toy_run(tmp_path), toys.regression

    def other(**sizes: int) -> Any:
        train, validation = regression(**sizes)
        train.tensors[0][0] += 1.0  # type: ignore[attr-defined]
        return train, validation

    other.__module__, other.__qualname__ = "toys", "regression"
    monkeypatch.setattr(toys, "regression", other)
    said = r"data: sample .* has changed since step-00000006 .*Restore the samples, or add --allow-changed to continue"
    with pytest.raises(ExperimentError, match=said):
        evaluated(folder, 6)
    with pytest.raises(ExperimentError, match=said):
        export_model(opened(folder), folder=folder, to=tmp_path / "out", checkpoint="last")
    assert "has changed since step-00000006" in evaluated(folder, 6, allow_changed=True).changes[-1]
    exported = export_model(opened(folder), folder=folder, to=tmp_path / "out", checkpoint="last", allow_changed=True)
    assert "has changed since step-00000006" in make_export_result(exported, tmp_path / "out").notes[0]
    plan = evaluating.make(opened(folder, "seed=4"), state=read_state(folder), checkpoint="6", split=None)
    assert [trial.allow_changed for trial in plan.trials if isinstance(trial, Evaluation)] == [True]


# The screen


def result_of(run: Path, *, classes: int, **more: Any) -> Result:
    matrix = {
        f"test/confusion_true_{true}_predicted_{other}": 30.0 * (true == other) + 1
        for true in range(classes)
        for other in range(classes)
    }
    found = Evaluated(
        trial=EVALUATION, split="test", samples=360, step=120, epoch=10, best="validation/loss",
        checkpoint="runs/20261125-211028-toy-3c35/checkpoints/step-00000120",
        values={"test/loss": 0.17, "test/accuracy": 0.95, **matrix}, **more,
    )  # fmt: skip
    plan = evaluating.make(opened(run), state=read_state(run), checkpoint="6", split=None)
    return evaluating.make_result(found, plan, folder=Path("runs/20261125-211028-toy-3c35"), has_choice=True)


def test_the_screen_of_an_evaluation(run: Path) -> None:
    result = result_of(run, classes=3, changes=("seed was 3, is now 4",))
    lines = format_screen(result)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    check("evaluate", "\n".join([*lines, ""]))
    assert result.verdict.startswith("test/loss 0.17, test/accuracy 0.95, test/confusion (9 values): test set, 360 sam")
    assert {fact.key: fact.value for fact in result.facts if fact.key in ("test/loss", "step", "samples")} == {
        "test/loss": 0.17, "step": 120, "samples": 360
    }  # fmt: skip
    large = result_of(run, classes=20)
    assert large.notes == ("test/confusion has 400 values: see pipeline evaluate --json.",)
    assert large.tables == ()


# The run stays what it was


def added(folder: Path, end: RunClosed | None) -> Iterator[Any]:
    """Events that an evaluation adds."""
    opened = TrialOpened(time=T0 + 900, trial=EVALUATION, role="evaluation", title="single", tags={}, params={})
    done = Evaluated(
        time=T0 + 901, trial=EVALUATION, split="test", samples=5, step=3, epoch=1, checkpoint="c",
        values={"test/loss": 0.5},
    )  # fmt: skip
    yield from (opened, done, *([end] if end else []))


@pytest.mark.parametrize("is_killed", [False, True])
def test_the_status_and_the_duration_stay(run: Path, tmp_path: Path, is_killed: bool) -> None:
    folder = tmp_path / "20260101-000000-toy-bbbb"
    folder.mkdir()
    (folder / journal.FILE_NAME).write_bytes((run / journal.FILE_NAME).read_bytes())
    path = folder / journal.FILE_NAME
    before, end = summarize_run(folder), journal.ending(path)
    assert end is not None
    with closing(Recorder(folder, subscribers=[])) as recorder:
        for event in added(folder, None if is_killed else end):
            recorder.receive(event)
    assert summarize_run(folder) == before
    assert journal.ending(path) == end
    assert next(iter_evaluations(folder)).endswith("test/loss 0.5: test set, 5 samples: weights of step 3 (epoch 1)")
    with closing(Recorder(folder, subscribers=[])) as recorder:  # continued, and killed
        begun = next(event for event in journal.read(path) if isinstance(event, RunOpened))
        recorder.receive(begun.model_copy(update={"time": T0 + 2000}))
        recorder.receive(Warned(message="trained further"))
    assert journal.ending(path) is None


def test_an_older_checkpoint_is_not_the_last_in_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = toy_run(tmp_path)
    assert chosen(folder, None).note == ""
    shutil.rmtree(folder / "checkpoints" / folder_name(6))
    note = "The latest checkpoint is from step 3, but training ended at step 6."
    assert chosen(folder, None).note == chosen(folder, "last").note == note
    assert chosen(folder, "3").note == ""
    told = changes(opened(folder, "train.epochs=9"), read_state(folder), allowed=False)
    assert told[-1] == f"{note} Training continues from the checkpoint."

    plan = evaluating.make(opened(folder), state=read_state(folder), checkpoint=None, split=None)
    result = evaluating.make_result(evaluated(folder, 3), plan, folder=folder, has_choice=True)
    assert result.notes[0] == note
    assert result.verdict.endswith(note)

"""``pipeline evaluate`` and ``pipeline export`` as users call them: terminal, journal, MLflow, `list` and `show`."""

# promise: `export`: the weights of the result, loaded where `pipeline` can't be imported
# promise: `evaluate`: a checkpoint's values are the training's, at any world size; the run keeps status and duration

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from recordings import Recording, Store, written_here
from toy_runs import toy_run

from pipeline.drive import recorded_run
from pipeline.protocol.events import Evaluated
from pipeline.record import journal as journals
from pipeline.record.folder import read_state
from pipeline.tracking.follow import sync
from pipeline.train import restored

BEST = {"best": "validation/loss", "mode": "max", "keep": 1}


@pytest.fixture
def there(command: Any, lab: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The command in the lab, writing to MLflow in this process."""
    monkeypatch.chdir(lab)

    def run(*words: str) -> Any:
        with written_here():
            return command(*words)

    return run


def last(folder: Path) -> Evaluated:
    return [e for e in journals.read(folder / journals.FILE_NAME) if isinstance(e, Evaluated)][-1]


@pytest.mark.parametrize("status", ["FINISHED", "KILLED", None])
def test_a_run_gets_the_values_and_stays_what_it_was(
    there: Callable[..., Any], lab: Path, store: Store, status: Any
) -> None:
    folder = toy_run(lab, status=status, checkpoint=BEST, data={"_target_": "toys.with_test"}, train={"epochs": 3},
                     tracking={"log_model": False})  # fmt: skip
    assert sync(folder, warn=pytest.fail).delivered
    (before,) = store.runs("toy")
    listed = json.loads(there("list", "--json").stdout)

    ended = there("evaluate", "aaaa", "--json")
    assert ended.code == 0, ended.output
    result = json.loads(ended.stdout)
    values = {fact["key"]: fact["value"] for fact in result["facts"]}
    assert (result["kind"], result["run"], values["step"]) == ("evaluate", folder.name, 3)
    assert result["headline"][-1] == "Weights of step 3 (epoch 1), the best validation/loss"
    assert values["test/loss"] == last(folder).values["test/loss"]

    other = there("evaluate", folder.name, "seed=4", "--checkpoint", "last", "--split", "validation")
    assert other.code == 0, other.output
    assert "\nNot the experiment that was trained: seed was 3, is now 4.\n" in other.stdout
    assert "\n         Weights of step 9 (epoch 3)\n" in other.stdout
    assert "\nRESULT   validation/loss " in other.stdout

    (after,) = store.runs("toy")  # no child
    both = [(3, values["test/loss"])] * 2  # at the training's end, and now
    assert store.series(after, "test/loss") == both
    assert store.series(after, "validation/loss")[-1][0] == 9
    assert after.data.tags["evaluated"] == "validation set, 10 samples: weights of step 9 (epoch 3)"
    assert after.data.tags["evaluated_changes"] == "seed was 3, is now 4"
    assert (after.info.status, after.info.end_time) == (before.info.status, before.info.end_time)
    assert read_state(folder).status == (status or "KILLED")
    (record,) = json.loads(there("list", "--json").stdout)
    ended_of_killed = {"ended", "seconds", "message"} if status is None else set()
    assert {**record, **dict.fromkeys(ended_of_killed)} == {**listed[0], **dict.fromkeys(ended_of_killed)}
    shown = there("show", "latest").stdout
    shown = " ".join(shown.split())
    assert f": test/loss {values['test/loss']:.4g}: test set, 22 samples: weights of step 3" in shown
    assert "(seed was 3, is now 4)" in shown

    contents = store.contents("toy")
    assert sync(folder, warn=pytest.fail).delivered
    assert store.contents("toy") == contents
    if status == "KILLED":
        resumed = there("run", str(folder / "experiment.yaml"), "--train-only", "--resume", folder.name)
        assert resumed.code == 0, resumed.output
        assert read_state(folder).status == "FINISHED"


def test_an_evaluation_that_fails_is_no_failure_of_the_run(there: Callable[..., Any], lab: Path, store: Store) -> None:
    folder = toy_run(lab, tracking={"log_model": False})
    ended = there("evaluate", "aaaa", "--split", "test", "--quiet")
    assert ended.code == 2
    assert "experiment.yaml" in ended.stderr
    assert "data: there is no test set to evaluate; use --split validation" in ended.stderr
    assert read_state(folder).status == "FINISHED"
    (run,) = store.runs("toy")
    assert (run.info.status, run.data.tags.get("error")) == ("FINISHED", None)
    said = there("evaluate", "aaaa", "--checkpoint", "5", "--quiet").stderr
    assert said.endswith(" of step 5. Its checkpoints: 3, 6.\n")


@pytest.mark.parametrize("is_killed", [False, True])
def test_an_evaluation_that_is_interrupted_leaves_the_run_finished(
    there: Callable[..., Any], lab: Path, store: Store, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    """Killed: its journal has no end, and MLflow gets nothing more."""
    folder = toy_run(lab, tracking={"log_model": False})
    assert sync(folder, warn=pytest.fail).delivered
    (before,) = store.runs("toy")
    listed = there("list", "--json").stdout

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(restored, "evaluate", interrupted)
    if is_killed:
        monkeypatch.setattr(recorded_run, "_closed_by_status", lambda *_, **__: nullcontext())
    ended = there("evaluate", "aaaa")
    assert (ended.code, ended.stderr.splitlines()[-1]) == (130, "error: interrupted")
    assert journals.ending(folder / journals.FILE_NAME) is not None
    assert read_state(folder).status == "FINISHED"
    assert there("list", "--json").stdout == listed
    (after,) = store.runs("toy")
    assert (after.info.status, after.info.end_time) == ("FINISHED", before.info.end_time)
    note = "mlflow.note.content"
    assert after.data.tags[note] == before.data.tags[note]


def test_recorded_runs_of_before_say_what_they_have(
    there: Callable[..., Any], journal: Callable[[str], Recording]
) -> None:
    single, sweep = journal("single"), journal("sweep")
    assert "no complete checkpoint" in there("evaluate", single.folder.name).stderr
    assert "is a sweep. Name one of its trials" in there("evaluate", sweep.folder.name).stderr


@pytest.mark.parametrize("words", [(), ("--json",), ("--quiet",)])
def test_export_says_what_it_has_written(there: Callable[..., Any], lab: Path, words: tuple[str, ...]) -> None:
    folder = toy_run(lab)
    ended = there("export", "latest", "--to", "out", *words)
    assert ended.code == 0, ended.output
    about = json.loads((lab / "out" / "model.json").read_text())
    if words == ("--json",):
        result = json.loads(ended.stdout)
        assert (result["kind"], result["run"], result["run"]) == ("export", folder.name, about["run"])
        assert {fact["key"]: fact["value"] for fact in result["facts"]}["step"] == about["weights"]["step"] == 6
    elif words == ("--quiet",):
        assert ended.stdout == "out: weights of step 6 (epoch 2)\n"
    else:
        assert ended.stdout.startswith("toy: model exported (torch.nn.Linear, fp64)\n\nRESULT   Weights of step 6 ")
        assert ended.stdout.endswith("\nLoad it  out/README.md\n")
    again = there("export", "latest", "--to", "out")
    assert (again.code, again.stdout) == (2, "")
    assert "--to out: is not empty" in again.stderr

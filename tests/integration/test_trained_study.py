"""``pipeline compare FILE --vary ...`` trains pairs, answers, is extended and resumed."""

# promise: a study of `compare` trains pairs with equal seeds, and is resumed and extended without training twice

import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from pipeline.protocol.events import RunOpened
from pipeline.record import journal

PATIENCE_S = 240.0
TEXT = """
name: {name}
seed: 3
model: {{_target_: pipeline.models.MLP, in_features: 64, hidden: [{width}], num_classes: 10}}
data: {{_target_: pipeline.data.digits}}
loss: {{_target_: torch.nn.CrossEntropyLoss}}
metrics:
  accuracy: {{_target_: torchmetrics.classification.MulticlassAccuracy, num_classes: 10, average: micro}}
optimizer: {{_target_: torch.optim.SGD, lr: 0.1}}
train: {{epochs: 3, global_batch_size: 64}}
parallel: {{strategy: single, launcher: inprocess, workers: 1}}
"""
WIDTHS = "model.hidden=[32],[2]"

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def file(tmp_path: Path) -> str:
    """An experiment that takes a second."""
    (tmp_path / "tiny.yaml").write_text(TEXT.format(name="tiny", width=32))
    return "tiny.yaml"


def ended(process: "subprocess.Popen[str]", code: int = 0) -> tuple[str, str]:
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code, stdout + stderr
    assert "Traceback" not in stdout + stderr
    return stdout, stderr


def study_in(folder: Path) -> Path:
    (found,) = (folder / "runs").glob("*-study-*")
    return found


def starts_of(study: Path) -> dict[str, int]:
    """Number of times that each training was started."""
    return {
        path.parent.name: sum(isinstance(event, RunOpened) for event in journal.read(path))
        for path in study.glob(f"trial-*/{journal.FILE_NAME}")
    }


@pytest.mark.timeout(600)
def test_a_difference_is_found_and_the_study_is_extended(start: Start, tmp_path: Path, file: str) -> None:
    stdout, _ = ended(start("compare", file, "--vary", WIDTHS, "--seeds", "3", "--json", cwd=tmp_path))
    found: dict[str, Any] = json.loads(stdout)
    assert (found["verdict"], found["metric"], found["unit"]) == ("worse", "validation/accuracy", "points")
    assert (found["pairs"], found["seeds"], found["time_to_target"]) == (3, [3, 4, 5], None)
    assert list(found["variants"]) == ["A", "B"]

    study = study_in(tmp_path)
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    runs = client.search_runs([one.experiment_id for one in client.search_experiments()])
    (parent,) = [run for run in runs if run.data.tags.get("role") == "study"]
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert {(run.data.tags["variant"], run.data.tags["seed"]) for run in children} == {
        (name, seed) for name in "AB" for seed in ("3", "4", "5")
    }
    assert {run.info.run_name for run in children} >= {"A, seed 3", "B, seed 5"}
    assert (parent.data.tags["verdict"], parent.data.tags["pairs"]) == ("worse", "3")
    assert "B is worse than A" in parent.data.tags["mlflow.note.content"]
    assert {"report.html", "differences.png", "learning_curves.png"} <= {path.name for path in study.iterdir()}

    _, stderr = ended(start("compare", file, "--vary", WIDTHS, "--seeds", "3", "--resume", cwd=tmp_path), code=2)
    assert "the study has its answer from 3 pairs. For more pairs, use --seeds" in " ".join(stderr.split())
    _, stderr = ended(
        start("compare", file, "--vary", "model.hidden=[32],[4]", "--seeds", "4", "--resume=latest", cwd=tmp_path),
        code=2,
    )
    assert "B: model.hidden was [2], is now [4]" in stderr

    more = ("--seeds", "4", "--resume=latest")
    stdout, _ = ended(start("compare", file, "--vary", WIDTHS, *more, cwd=tmp_path))
    lines = stdout.splitlines()
    assert lines[-1].endswith("4 pairs")
    assert "The study was extended after an answer from 3 pairs, so its interval is wider" in " ".join(stdout.split())
    assert starts_of(study_in(tmp_path)) == {f"trial-{number:03}": 1 for number in range(1, 9)}

    for verb in (["compare"], ["show"]):
        stdout, _ = ended(start(*verb, "latest", "--json", cwd=tmp_path))
        assert json.loads(stdout)["pairs"] == 4


@pytest.mark.timeout(600)
def test_a_sweep_ends_with_the_command_that_compares_its_best_two(start: Start, tmp_path: Path, file: str) -> None:
    parameters = "sweep: {metric: validation/accuracy, mode: max, parameters: {model.hidden: {grid: [[32], [2]]}}}"
    (tmp_path / "swept.yaml").write_text(f"extends: {file}\n{parameters}\n")
    stdout, _ = ended(start("sweep", "swept.yaml", cwd=tmp_path))
    lines = stdout.splitlines()
    (first,) = (number for number, line in enumerate(lines) if line.startswith("Confirm  pipeline compare "))
    command = "\n".join(lines[first:]).partition("\nReport ")[0].removeprefix("Confirm  ")
    _, *words = shlex.split(command.replace("\\\n", " "))  # as a shell joins the lines
    stdout, _ = ended(start(*words, "--dry-run", cwd=tmp_path))
    assert "A            model.hidden=[2]\nB            model.hidden=[32]\n" in stdout
    assert stdout.endswith("B, seed 8\n")  # five pairs, from the seed after that of the sweep
    words[words.index("--seeds") + 1] = "2"
    stdout, _ = ended(start(*words, cwd=tmp_path))
    assert stdout.splitlines()[-1].split(". ")[0].endswith("2 pairs")


@pytest.mark.timeout(600)
def test_ctrl_c_keeps_what_was_trained(start: Start, tmp_path: Path, file: str) -> None:
    words = ("compare", file, "--vary", WIDTHS, "--seeds", "2", "--target", "auto", "train.epochs=40")
    process = start(*words, cwd=tmp_path)
    deadline = time.monotonic() + PATIENCE_S
    while not any((tmp_path / "runs").glob("*-study-*/trial-002/events.jsonl")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = ended(process, code=130)
    assert "trainings are left" in stdout
    assert f"--resume {study_in(tmp_path).name}" in stdout + stderr

    stdout, _ = ended(start(*words, "--resume=latest", cwd=tmp_path))
    assert starts_of(study_in(tmp_path))["trial-001"] == 1
    said = " ".join(stdout.split())
    assert "TIME validation/accuracy " in said
    assert "x sooner" in said or "x later" in said
    begins = [next(iter(journal.read(path))).time for path in sorted(study_in(tmp_path).glob("trial-*/events.jsonl"))]
    assert begins == sorted(begins)

"""``pipeline compare FILE --vary ...`` trains pairs, answers, continues and is extended."""

# promise: `compare` trains pairs with equal seeds, and continues and is extended without training twice

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
from pipeline.record.runs import summaries

PATIENCE_S = 240.0
TEXT = """
name: tiny
seed: 3
model: {_target_: pipeline.models.MLP, in_features: 64, hidden: [32], num_classes: 10}
data: {_target_: pipeline.data.digits}
loss: {_target_: torch.nn.CrossEntropyLoss}
metrics:
  accuracy: {_target_: torchmetrics.classification.MulticlassAccuracy, num_classes: 10, average: micro}
optimizer: {_target_: torch.optim.SGD, lr: 0.1}
train: {epochs: 3, global_batch_size: 64}
parallel: {strategy: single, launcher: inprocess, workers: 1}
tracking: {log_model: false}
"""
WIDTHS = "model.hidden=[32],[2]"

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def file(tmp_path: Path) -> str:
    """An experiment that takes a second."""
    (tmp_path / "tiny.yaml").write_text(TEXT)
    return "tiny.yaml"


def ended(process: "subprocess.Popen[str]", code: int = 0) -> tuple[str, str]:
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code, stdout + stderr
    assert "Traceback" not in stdout + stderr
    return stdout, stderr


def trainings(folder: Path) -> list[tuple[str, str, int]]:
    """Width, seed and number of starts of each training, the oldest first."""
    found = []
    for run in summaries(folder / "runs"):
        if run.command == "run":
            events = journal.marked(run.folder / journal.FILE_NAME, "run_opened")
            starts = [event for event in events if isinstance(event, RunOpened)]
            found.append((starts[0].params["model.hidden"], starts[0].params["seed"], len(starts)))
    return found


def facts(document: dict[str, Any]) -> dict[str, float]:
    return {fact["key"]: fact["value"] for fact in document["facts"]}


@pytest.mark.timeout(600)
def test_a_difference_is_found_and_extended(start: Start, tmp_path: Path, file: str) -> None:
    """One of the pairs is there already: a run that `pipeline run` has trained."""
    ended(start("run", file, "seed=4", "--train-only", cwd=tmp_path))
    command = ("compare", file, "--vary", WIDTHS)
    stdout, stderr = ended(start(*command, "--seeds", "2", "--json", cwd=tmp_path))
    found: dict[str, Any] = json.loads(stdout)
    assert (found["kind"], found["answer"], facts(found)["pairs"]) == ("compare", "worse", 2)
    assert "training A, seed 3 (1 of 3)" in stderr
    assert trainings(tmp_path) == [("[32]", "4", 1), ("[32]", "3", 1), ("[2]", "3", 1), ("[2]", "4", 1)]

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    runs = client.search_runs([one.experiment_id for one in client.search_experiments()])
    (own,) = [run for run in runs if run.data.tags.get("role") == "compare"]
    assert (own.data.tags["verdict"], own.data.tags["pairs"]) == ("worse", "2")
    assert "B is worse than A" in own.data.tags["mlflow.note.content"]
    assert own.data.metrics["difference"] == facts(found)["difference"]

    stdout, stderr = ended(start(*command, "--seeds", "3", cwd=tmp_path))
    assert "training B, seed 5 (2 of 2)" in stderr
    lines = stdout.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert "Extended after a look: 2 pairs said before: B is worse than A" in " ".join(stdout.split())
    assert [starts for *_, starts in trainings(tmp_path)] == [1] * 6
    (folder,) = [path for path in (tmp_path / "runs").glob("*-compare-*") if path.name in " ".join(lines)]
    assert {"result.json", "report.html", "environment.txt"} <= {path.name for path in folder.iterdir()}

    again, _ = ended(start("show", "latest", cwd=tmp_path))
    assert again == stdout
    quiet, stderr = ended(start(*command, "--seeds", "3", "--quiet", cwd=tmp_path))  # trains nothing
    assert (quiet.count("\n"), quiet.startswith("B is worse than A: ")) == (1, True)
    assert len(trainings(tmp_path)) == 6


@pytest.mark.timeout(600)
def test_a_sweep_ends_with_the_command_that_compares_its_best_two(start: Start, tmp_path: Path, file: str) -> None:
    parameters = "sweep: {metric: validation/accuracy, mode: max, parameters: {model.hidden: {grid: [[32], [2]]}}}"
    (tmp_path / "swept.yaml").write_text(f"extends: {file}\n{parameters}\n")
    stdout, _ = ended(start("sweep", "swept.yaml", cwd=tmp_path))
    lines = stdout.splitlines()
    (first,) = (number for number, line in enumerate(lines) if line.startswith("CONFIRM  pipeline compare "))
    command = "\n".join(lines[first:]).partition("\n\n")[0].removeprefix("CONFIRM  ")
    _, *words = shlex.split(command.replace("\\\n", " "))  # as a shell joins the lines
    stdout, _ = ended(start(*words, "--dry-run", cwd=tmp_path))
    second, best = (line.split()[1] for line in stdout.splitlines()[:2])
    assert "hidden:\n  - 2\n" in (tmp_path / second).read_text()
    assert "hidden:\n  - 32\n" in (tmp_path / best).read_text()
    assert stdout.endswith("B, seed 8\n")  # five pairs, from the seed after that of the sweep


@pytest.mark.timeout(600)
def test_ctrl_c_keeps_what_was_trained_and_times_are_split(start: Start, tmp_path: Path, file: str) -> None:
    words = ("compare", file, "--vary", WIDTHS, "--seeds", "2", "--target", "auto", "train.epochs=40")
    process = start(*words, cwd=tmp_path)
    deadline = time.monotonic() + PATIENCE_S
    while len([*(tmp_path / "runs").glob("*/events.jsonl")]) < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = ended(process, code=130)
    assert stdout == ""
    assert "1 of 4 missing trainings are done; the same command continues" in stderr
    before = len(trainings(tmp_path))

    stdout, _ = ended(start(*words, "--json", cwd=tmp_path))
    found = json.loads(stdout)
    ratios = facts(found)
    assert ratios["target_sooner"] == pytest.approx(ratios["target_rate"] / ratios["target_samples"])
    assert "device hours" in found["headline"][0]
    assert [width for width, *_ in trainings(tmp_path)[before:]] == ["[32]", "[2]", "[2]", "[32]"]  # both of a pair


@pytest.mark.timeout(600)
def test_a_training_that_fails_costs_its_pair_and_the_exit_code(start: Start, tmp_path: Path, file: str) -> None:
    words = ("compare", file, "--vary", "optimizer.lr=0.1,1e30", "--seeds", "2", "--concurrent", "2")
    stdout, stderr = ended(start(*words, cwd=tmp_path), code=1)
    assert stdout == ""
    assert "all trainings of a variant failed. The first error: B, seed 3: " in stderr

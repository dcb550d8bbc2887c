"""``pipeline run --again RUN``: the same run, what differs, and from which step on."""

# promise: `run --again` repeats a run to the bit, or says what differs and from which step on

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.commands.repetition import describe_losses
from pipeline.recording.journal import loss_file

Command = Callable[..., Any]
SHORT = ("--train-only", "--quiet")


def test_a_run_is_repeated_to_the_bit(command: Command, tmp_path: Path) -> None:
    where = (f"tracking.directory={tmp_path}/runs", f"tracking.uri=sqlite:///{tmp_path}/mlflow.db")
    data = "data={_target_: lab.points, samples: 60}"
    first = command("run", "lab.yaml", *SHORT, "parallel.launcher=inprocess", "seed=5", data, *where)
    assert first.code == 0, first.output
    (folder,) = (tmp_path / "runs").iterdir()
    packages = folder / "environment.txt"
    packages.write_text(packages.read_text() + "\nlab-package==1.0\n")

    again = command("run", "--again", str(folder), *SHORT)
    assert again.code == 0, again.output
    assert f"lab-package is missing, was 1.0 in {folder.name}" in " ".join(again.stderr.split())
    assert "data digest" not in again.stderr
    assert again.stdout.endswith("same losses to the bit in all 8 steps\n")

    losses = list(loss_file.read(folder))
    loss_file.write(folder, [losses[2] * (1 + 1e-15)], first=3)
    changed = command("run", "--again", str(folder), *SHORT)
    assert changed.code == 0, changed.output
    assert "losses differ from step 3 of 8: " in changed.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ([1.0, math.nan], [1.0, math.nan], "same losses to the bit in all 2 steps"),
        ([0.5, 0.0], [0.5, -0.0], "losses differ from step 2 of 2: -0.0, was 0.0 in A"),
        ([0.5, 0.1], [0.5], "same losses to the bit in the first 1 step; A has 2, this run 1"),
        ([], [0.5], "no losses to compare: A has none"),
    ],
)
def test_the_first_step_that_differs_is_named(before: list[float], now: list[float], said: str) -> None:
    assert describe_losses(before, now, earlier="A") == said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--again", "latest", "seed=3"], "--again latest: repeats the run as it was. Remove the file, the overrides"),
        (["--again", "no-such-run"], "--again no-such-run: no such run in runs"),
        ([], "no file is named. Write pipeline run FILE, or pipeline run --again RUN."),
    ],
)
def test_what_is_no_repetition_is_refused(words: list[str], said: str, command: Command) -> None:
    ended = command("run", *words)
    assert ended.code == 2
    assert said in ended.stderr

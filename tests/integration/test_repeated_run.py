"""``pipeline run --again RUN`` repeats a training, with all that it trains."""

# promise: `run --again` repeats a run to the bit, or says what differs and from which step on

from collections.abc import Callable
from pathlib import Path
from typing import Any

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

"""Where a run keeps its checkpoints, as the command does it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.protocol.events import (
    CheckpointSaved,
    Event,
)
from pipeline.recording.journal import journal
from pipeline.training.checkpoints.manifest import folder_name


def test_a_run_keeps_its_checkpoints_in_its_folder(command: Callable[..., Any], project: Path, tmp_path: Path) -> None:
    ended = command(
        "run", "lab.yaml", "--no-baseline", "checkpoint.every_steps=3", f"tracking.directory={tmp_path}/runs",
        f"tracking.uri=sqlite:///{tmp_path}/mlflow.db",
    )  # fmt: skip
    assert ended.code == 0, ended.output
    (folder,) = (tmp_path / "runs").iterdir()
    events: list[Event] = list(journal.read(folder / journal.FILE_NAME))
    saved = [event for event in events if isinstance(event, CheckpointSaved)]

    assert [event.step for event in saved] == [3, 4, 6, 8]
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {folder_name(6), folder_name(8)}
    assert Path(saved[-1].path) == folder / "checkpoints" / folder_name(8)
    assert json.loads((Path(saved[-1].path) / "manifest.json").read_text())["step"] == 8

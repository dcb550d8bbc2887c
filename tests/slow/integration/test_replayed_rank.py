"""A rank's part of a trial, started again by hand."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import toys

from pipeline.protocol.events import AnyEvent, Failed, Finished, Metrics, event_from_json
from pipeline.protocol.trial import Trial


@pytest.fixture(autouse=True)
def same_threads() -> Any:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def replay(trial: Trial, folder: Path) -> tuple[int, list[AnyEvent], str]:
    """``python -m pipeline.worker trial.json``, as somebody would who looks for a mistake."""
    path = folder / "trial.json"
    path.write_text(trial.model_dump_json())
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.worker", str(path)], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(Path(toys.__file__).parent)},
    )  # fmt: skip
    return done.returncode, [event_from_json(line) for line in done.stdout.splitlines()], done.stderr


def test_a_rank_can_be_replayed_by_hand(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    code, events, stderr = replay(toys.trial().model_copy(update={"checkpoints": str(checkpoints)}), tmp_path)
    _, outbox = toys.trained()

    assert (code, stderr) == (0, "")
    assert isinstance(events[-1], Finished)
    replayed = [p.value for e in events if isinstance(e, Metrics) for p in e.points if p.name == "train/loss"]
    assert replayed == outbox.series("train/loss")
    assert not checkpoints.exists(), "those of the run would be replaced"


def test_a_replayed_failure_is_seen(tmp_path: Path) -> None:
    code, events, stderr = replay(toys.trial(model={"_target_": "toys.BrokenModel"}), tmp_path)

    assert code == 1
    assert isinstance(events[-1], Failed)
    assert "LookupError: the user's own mistake" in stderr

"""Checkpoints of earlier versions with state beside weights and one optimizer are resumed exactly."""

# promise: averages, a gradient scaler and two optimizers of earlier checkpoints are resumed exactly

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recordings import JOURNALS, Recording, written_here

from pipeline.protocol.events import Resumed

Journal = Callable[[str], Recording]
EACH_STEP = ("train.log_every_steps=1", "tracking.log_model=false")


@pytest.mark.parametrize("name", ["killed-ema", "killed-fp16", "killed-optimizers"])
def test_state_of_before_is_resumed(
    journal: Journal, lab: Path, store: Any, command: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Averages, a gradient scaler, two optimizers with schedulers: the rest is that of a training without a pause."""
    killed = journal(name)
    monkeypatch.chdir(lab)
    monkeypatch.syspath_prepend(JOURNALS.parent / "project")
    (lab / "pyproject.toml").write_text((JOURNALS.parent / "project" / "pyproject.toml").read_text())
    monkeypatch.setattr("time.sleep", lambda _: None)
    (newest,) = (int(path.name.removeprefix("step-")) for path in (killed.folder / "checkpoints").iterdir())
    experiment = str(killed.folder / "experiment.yaml")

    with written_here():
        command("run", experiment, "--no-baseline", *EACH_STEP)
        ended = command("run", experiment, "--no-baseline", "--resume", killed.folder.name, *EACH_STEP)

    assert ended.code == 0, ended.output
    assert [event.step for event in killed.all_of(Resumed)] == [newest]
    (whole,) = {*killed.folder.parent.iterdir()} - {killed.folder}
    undisturbed = Recording(whole)
    for series in ("train/loss", "train/learning_rate", "validation/loss"):
        assert killed.series(series) == undisturbed.series(series)

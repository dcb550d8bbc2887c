"""Trackers of ``tracking.loggers`` and ``pipeline sync``, which sends what a run could not."""

# promise: `tracking.loggers`: TensorBoard has each point once, also of a resumed run; `sync` sends what is missing

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from recordings import Recording, Store
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeline.record import journal as journals

Journal = Callable[[str], Recording]


def with_also(recording: Recording, *names: str) -> Path:
    """The run as if its experiment had had these trackers."""
    path = recording.folder / journals.FILE_NAME
    also = ", ".join(f'"{name}"' for name in names)
    path.write_bytes(path.read_bytes().replace(b'"also":[]', f'"also":[{also}]'.encode()))  # of each session
    return recording.folder


def test_a_run_of_two_sessions_has_each_step_once(store: Store, journal: Journal, command: Any) -> None:
    recording = journal("resumed")
    folder = with_also(recording, "tensorboard")
    for _ in range(2):
        ended = command("sync", str(folder))
        assert (ended.code, ended.stderr) == (0, "")
    read = EventAccumulator(str(folder / "tensorboard" / "main"), size_guidance={"scalars": 0}).Reload()
    losses = dict(recording.series("train/loss"))
    assert [point.step for point in read.Scalars("train/loss")] == [*losses]
    assert [point.value for point in read.Scalars("train/loss")] == pytest.approx([*losses.values()])  # of 32 bits


def test_one_that_fails_is_told_once_and_stops_no_other(
    store: Store, journal: Journal, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(ModuleType):
        def init(self, **_: object) -> None:
            raise ConnectionError("no API key")

    wandb = Broken("wandb")
    wandb.Settings = lambda **_: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    folder = with_also(journal("single"), "wandb", "tensorboard")
    ended = command("sync", str(folder))
    assert ended.code == 3
    assert ended.stderr.splitlines() == [
        "wandb raised ConnectionError: no API key. It gets no further events. "
        f"Send the rest with: pipeline sync {folder}"
    ]
    assert "is in MLflow" in ended.stdout
    assert list((folder / "tensorboard" / "main").iterdir())


def test_another_store_gets_no_trackers(store: Store, journal: Journal, command: Any, lab: Path) -> None:
    folder = with_also(journal("single"), "tensorboard")
    assert command("sync", str(folder), "--to", f"sqlite:///{lab}/mlflow.db").code == 0
    assert not (folder / "tensorboard").exists()

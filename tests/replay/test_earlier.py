"""Journals and checkpoints of earlier versions stay readable, and are gone on with."""

# promise: journals and checkpoints of earlier versions can be read
# promise: where a training's wall clock goes, every second with one name

import io
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import rich.console
from recordings import JOURNALS, Recording, written_here

from pipeline.driver.elastic import course, remark
from pipeline.protocol.events import (
    CheckpointSaved,
    Metrics,
    Resumed,
    RunClosed,
    Started,
    event_from_json,
    event_to_json,
)
from pipeline.recording.journal.folder import read_state
from pipeline.recording.journal.journal import FILE_NAME, read
from pipeline.recording.journal.recorder import Recorder
from pipeline.recording.terminal.console import Console
from pipeline.recording.terminal.terminal import Terminal
from pipeline.report.numbers.goodput import WallClock

Journal = Callable[[str], Recording]
NAMES = sorted(path.name for path in JOURNALS.iterdir() if (path / "events.jsonl").exists())


@pytest.mark.parametrize("name", NAMES)
def test_every_event_of_every_journal_is_understood(name: str) -> None:
    events = list(read(JOURNALS / name / FILE_NAME))
    lines = (JOURNALS / name / FILE_NAME).read_bytes().splitlines()
    assert len(events) == len(lines)
    for event in events:  # as text, since NaN is unlike itself
        assert str(event_from_json(event_to_json(event))) == str(event)


@pytest.mark.parametrize("name", NAMES)
def test_every_run_says_how_it_stands(journal: Journal, name: str) -> None:
    recording = journal(name)
    state = read_state(recording.folder)
    closed = recording.all_of(RunClosed)
    assert state.status == (closed[-1].status if closed else "KILLED")
    assert state.experiment.name in ("tiny", "lab")


@pytest.mark.parametrize("name", NAMES)
def test_a_recorder_takes_each_event_and_goes_on_with_the_journal(tmp_path: Path, journal: Journal, name: str) -> None:
    events = journal(name).events
    (tmp_path / "again").mkdir()
    recorder = Recorder(tmp_path / "again", subscribers=[])
    for event in events:
        recorder.receive(event)
    recorder.close()
    again = list(read(tmp_path / "again" / FILE_NAME))
    assert [event.kind for event in again] == [event.kind for event in events]
    assert _points(again) == _points(events)
    continued = Recorder(tmp_path / "again", subscribers=[])
    for event in events:
        if isinstance(event, Metrics):
            continued.receive(event)
    continued.close()
    assert continued.is_resumed
    assert _points(list(read(tmp_path / "again" / FILE_NAME))) == _points(events)  # each once


def _points(events: list[Any]) -> list[str]:
    return [f"{event.trial} {event.repeat} {p}" for event in events if isinstance(event, Metrics) for p in event.points]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "sweep"])
def test_the_terminal_shows_each_run(journal: Journal, name: str) -> None:
    recording, shown = journal(name), io.StringIO()
    console = Console(Terminal.on(rich.console.Console(file=shown, width=120)), trials=recording.trials)
    for event in recording.events:
        console.receive(event)
    console.close()
    lines = shown.getvalue().splitlines()
    assert all(line.isprintable() for line in lines)
    for start in recording.all_of(Started):
        assert any(f"{start.parameters:,} parameters" in line for line in lines)
    for warned in (event for event in recording.events if event.kind == "warned"):
        assert any(warned.message in line for line in lines)  # type: ignore[union-attr]


def test_an_elastic_run_tells_its_course(journal: Journal) -> None:
    elastic = journal("elastic")
    assert [len(event.devices) for event in elastic.all_of(Started)] == [1, 2, 1]
    (told,) = remark(course(iter(elastic.events), trial="main"))
    assert told.startswith("The number of workers changed: 1 from step 1 on, 2 from step 31 on, 1 from step 41 on.")


def test_a_checkpoint_of_before_is_gone_on_from_exactly(
    journal: Journal, lab: Path, store: Any, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers under torchrun were killed; one in this process goes on, and ends as those that were resumed."""
    killed, resumed = journal("killed"), Recording(JOURNALS / "resumed")
    monkeypatch.chdir(lab)
    monkeypatch.syspath_prepend(JOURNALS.parent / "project")
    (lab / "pyproject.toml").write_text((JOURNALS.parent / "project" / "pyproject.toml").read_text())
    newest = max(int(path.name.removeprefix("step-")) for path in (killed.folder / "checkpoints").iterdir())

    alone = ("parallel.launcher=inprocess", "parallel.strategy=single", "parallel.workers=1")
    experiment = str(killed.folder / "experiment.yaml")
    with written_here():
        resume = ("--no-baseline", "--resume", killed.folder.name)
        ended = command("run", experiment, *resume, *alone, "tracking.log_model=false", "train.log_every_steps=1")

    assert ended.code == 0, ended.output
    assert [event.step for event in killed.all_of(Resumed)] == [newest]
    assert [step for step, _ in killed.series("train/loss")] == list(range(1, 101))
    for name in ("train/loss", "train/learning_rate", "validation/loss"):
        found, expected = killed.series(name), resumed.series(name)
        assert [step for step, _ in found] == [step for step, _ in expected]
        assert [value for _, value in found] == pytest.approx([value for _, value in expected], rel=0, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "uses"),
    [
        ("resumed", {"start", "steps", "evaluation", "saving", "stopped"}),
        ("elastic", {"start", "steps", "evaluation", "saving", "redone", "stopped"}),
    ],
)
def test_the_seconds_of_all_attempts_add_up_to_the_wall_clock(journal: Journal, name: str, uses: set[str]) -> None:
    recording = journal(name)
    goodput = WallClock("main", recording.events).goodput
    assert goodput is not None
    last = recording.all_of(CheckpointSaved)[-1].time  # in these journals no event stands for the training's end
    assert goodput.total_s == pytest.approx(last - recording.events[0].time)
    assert {use for use, seconds in goodput.seconds.items() if seconds} == uses
    assert sum(goodput.shares.values()) == pytest.approx(1)
    windows = dict(recording.series("time/step_ms"))
    assert goodput.seconds["steps"] == pytest.approx(_in_windows(windows) / 1000, rel=0.02)


def _in_windows(windows: dict[int, float]) -> float:
    """Milliseconds in all windows, by the step that each ends with."""
    return sum((step - before) * windows[step] for before, step in pairwise([0, *windows]))

"""The address of a run in MLflow, told as soon as MLflow has the run."""

import io
import os
import threading
from pathlib import Path

import pytest
import rich.console

from pipeline.protocol.events import RunClosed
from pipeline.record.screen import linked
from pipeline.tracking import follower
from pipeline.tracking.follower import Follower
from pipeline.tracking.store import TrackingOutcome, link_of

ADDRESS = "http://127.0.0.1:5000/#/experiments/1/runs/0f3a?workflowType=machine_learning"
OPENED = TrackingOutcome(experiment_id="1", run_id="0f3a", delivered=True)
LINE = f"mlflow   {ADDRESS}"


class Process:
    """Stands in for the process of `pipeline.tracking.follow`; it says a line at once, or after the run's end."""

    def __init__(self, line: str, *, after_end: bool = False) -> None:
        reader, writer = os.pipe()
        self.stdin, self.stdout = io.BytesIO(), os.fdopen(reader, "rb")
        self._writer, self.returncode = os.fdopen(writer, "wb"), 0
        self._line = f"{line}\n".encode()
        self._ended = threading.Event()
        self.stdin.flush = self._ended.set  # type: ignore[method-assign]
        threading.Thread(target=self._speak, args=(after_end,)).start()

    def _speak(self, after_end: bool) -> None:
        if after_end:
            self._ended.wait(60)
        with self._writer:
            self._writer.write(self._line)

    def wait(self) -> int:
        return self.returncode

    def kill(self) -> None:
        self.returncode = -9
        self._ended.set()


def following(folder: Path, process: Process, monkeypatch: pytest.MonkeyPatch) -> tuple[Follower, list[str]]:
    """A follower with this process, and the runs that it has told of."""
    told = list[str]()
    monkeypatch.setattr(follower.subprocess, "Popen", lambda *_, **__: process)
    return Follower(folder, uri="sqlite:///mlflow.db", warn=pytest.fail, opened=told.append), told


def test_a_run_is_told_as_soon_as_the_store_has_it_unless_its_end_names_all_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, told = following(tmp_path, Process(f"opened {LINE}"), monkeypatch)
    one._done.wait(60)
    one.close()
    assert told == [LINE]
    one, told = following(tmp_path, Process(f"opened {LINE}", after_end=True), monkeypatch)
    one.receive(RunClosed(status="FINISHED"))
    assert one.finish(60)
    one.close()
    assert told == []


def test_what_an_earlier_session_has_sent_says_nothing_of_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    OPENED.keep(tmp_path)
    process = Process("done tensorboard", after_end=True)
    process._ended.clear()
    one, _ = following(tmp_path, process, monkeypatch)
    killed = TrackingOutcome.read(tmp_path)
    assert killed is not None
    assert (killed.run_id, killed.delivered) == ("0f3a", False)
    assert "some results (the driver was killed)" in killed.message
    process.stdin.flush = lambda: None  # type: ignore[method-assign]
    assert not one.finish(0)
    assert one.late == ["MLflow"]
    assert "some results (the run stopped waiting)" in one.close().message


def test_addresses_are_links_that_no_terminal_breaks() -> None:
    stdout = rich.console.Console(file=io.StringIO(), width=40, force_terminal=True, color_system="truecolor")
    pipe = rich.console.Console(file=io.StringIO(), width=40)
    line = link_of("sqlite:///mlflow.db", OPENED)
    for console in (stdout, pipe):
        console.print(linked(line), soft_wrap=True)
    assert isinstance(stdout.file, io.StringIO)
    assert isinstance(pipe.file, io.StringIO)
    assert pipe.file.getvalue() == f"mlflow   pipeline ui, then {ADDRESS}\n"
    shown = stdout.file.getvalue()
    assert shown.startswith("mlflow   pipeline ui, then \x1b]8;id=")
    assert f";{ADDRESS}\x1b\\{ADDRESS}\x1b]8;;\x1b\\\n" in shown

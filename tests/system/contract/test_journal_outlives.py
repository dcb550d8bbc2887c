"""A journal outlives its process; a disk that is full stops its run, and the run continues once there is room."""

import errno
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import IO, Any, cast

import pytest
import rich.console
import toys

from pipeline.drive.execute import execute
from pipeline.drive.recorded_run import Log
from pipeline.launch import inprocess
from pipeline.launch.base import Session
from pipeline.protocol.events import AnyEvent, Metrics, Point, Resumed, RunClosed, Warned
from pipeline.record.journal import FILE_NAME, Journal, is_open, read
from pipeline.record.recorder import Recorder

EVENTS: list[AnyEvent] = [
    Metrics(time=1.5, step=1, epoch=1, points=(Point("train/loss", 1, 0.5), Point("train/loss", 2, float("inf")))),
    Warned(time=2.0, message="two\nlines, \u00fcml\u00e4ut"),
    RunClosed(time=3.0, status="FINISHED"),
]

WRITER = """
import sys
from pathlib import Path
from pipeline.protocol.events import Warned
from pipeline.record.journal import Journal

journal = Journal(Path(sys.argv[1]))
for number in range(100):
    journal.append(Warned(time=number, message=str(number)))
print("written", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / FILE_NAME


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of some hundred kilobytes, half of them in the file "ballast"."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], check=True)
    (disk / "ballast").write_bytes(bytes(2**17))
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def test_a_killed_driver_loses_nothing_that_it_appended(path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"written\n"
        assert is_open(path)
        writer.send_signal(signal.SIGKILL)
    assert [event.time for event in read(path)] == list(range(100))
    assert not is_open(path)


def test_an_event_without_room_is_an_error_and_is_written_before_the_next_one(small_disk: Path) -> None:
    journal = Journal(small_disk / FILE_NAME)
    event = Warned(time=1.0, message="x" * 100)
    appended: list[AnyEvent] = []

    def fill() -> None:
        while True:
            appended.append(event.model_copy(update={"time": float(len(appended))}))
            journal.append(appended[-1])

    with pytest.raises(OSError, match=FILE_NAME) as raised:
        fill()
    assert raised.value.errno == errno.ENOSPC
    assert list(read(small_disk / FILE_NAME)) == appended[:-1]  # of the last one, a part is there

    appended.append(EVENTS[1])
    with pytest.raises(OSError, match="No space left"):
        journal.append(EVENTS[1])
    (small_disk / "ballast").unlink()
    appended.append(EVENTS[-1])
    journal.append(EVENTS[-1])
    assert list(read(small_disk / FILE_NAME)) == appended
    journal.close()


class Filler:
    """Fills the disk after a step."""

    def __init__(self, disk: Path, *, step: int) -> None:
        self._disk, self._step = disk, step

    def receive(self, event: AnyEvent) -> None:
        if isinstance(event, Metrics) and event.step == self._step:
            with (self._disk / "more").open("ab", buffering=0) as file, suppress(OSError):
                while True:
                    file.write(bytes(64))


def test_a_full_disk_stops_a_training_after_a_checkpoint_from_which_it_continues(
    small_disk: Path, tmp_path: Path
) -> None:
    trial = toys.trial(train={"epochs": 40}).model_copy(update={"checkpoints": str(tmp_path / "checkpoints")})

    def run(*, resume: bool) -> list[AnyEvent]:
        recorder = Recorder(small_disk, subscribers=[Filler(small_disk, step=30)])
        session = Session(folder=small_disk, receive=recorder.receive, parallel=trial.experiment.parallel)
        with closing(recorder), inprocess.Launcher(session) as launcher:
            file: Any = None
            try:
                execute(trial.model_copy(update={"resume": resume}), launcher=launcher, recorder=recorder, file=file)
            finally:
                events = list(read(small_disk / FILE_NAME))
        return events

    with pytest.raises(OSError, match="No space left"):
        run(resume=False)
    recorded = list(read(small_disk / FILE_NAME))
    stopped_at = max(int(path.name.removeprefix("step-")) for path in (tmp_path / "checkpoints").glob("step-*"))
    assert 30 < stopped_at < 120
    (small_disk / "ballast").unlink()
    events = run(resume=True)
    assert events[: len(recorded)] == recorded
    assert [event.step for event in events if isinstance(event, Resumed)] == [stopped_at]
    assert max(event.step for event in events if isinstance(event, Metrics)) == 120


def test_a_log_never_fails(small_disk: Path) -> None:
    log = Log(small_disk / "log.txt")
    console, handler = rich.console.Console(file=cast("IO[str]", log)), logging.StreamHandler(log)
    while (small_disk / "log.txt").stat().st_size < 2**17:
        console.print("x" * 60)
    for _ in range(10):
        console.print("without room")
    handler.handle(logging.LogRecord("name", logging.INFO, "", 0, "said", None, None))
    (small_disk / "ballast").unlink()
    console.print("the end")
    log.close()
    handler.handle(logging.LogRecord("name", logging.INFO, "", 0, "too late", None, None))
    text = (small_disk / "log.txt").read_text()
    assert text.endswith("the end\n")
    assert "said" not in text

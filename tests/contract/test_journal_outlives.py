"""A journal outlives its process, and a disk that is full for a while."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

import pytest
import rich.console

from pipeline.protocol.events import AnyEvent, Metrics, Point, RunClosed, Warned
from pipeline.recording.appender import Log
from pipeline.recording.journal import FILE_NAME, Journal, is_open, read

EVENTS: list[AnyEvent] = [
    Metrics(time=1.5, step=1, epoch=1, points=(Point("train/loss", 1, 0.5), Point("train/loss", 2, float("inf")))),
    Warned(time=2.0, message="two\nlines, \u00fcml\u00e4ut"),
    RunClosed(time=3.0, status="FINISHED"),
]

WRITER = """
import sys
from pathlib import Path
from pipeline.protocol.events import Warned
from pipeline.recording.journal import Journal

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


def test_events_wait_for_room_in_order_and_none_is_torn(small_disk: Path) -> None:
    journal = Journal(small_disk / FILE_NAME)
    event = Warned(time=1.0, message="x" * 100)
    appended: list[AnyEvent] = []
    while not journal.trouble:
        appended.append(event.model_copy(update={"time": float(len(appended))}))
        journal.append(appended[-1])
    assert journal.trouble.startswith("the disk is full")
    assert journal.missing == 1
    assert list(read(small_disk / FILE_NAME)) == appended[:-1]  # of the last one, a part is there

    appended += [event, EVENTS[-1]]
    for late in appended[-2:]:
        journal.append(late)
    assert journal.missing == 3
    (small_disk / "ballast").unlink()
    appended.append(EVENTS[0])
    journal.append(EVENTS[0])
    assert (journal.trouble, journal.missing) == ("", 0)
    assert list(read(small_disk / FILE_NAME)) == appended
    journal.close()


def test_what_waits_in_memory_has_a_limit(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.recording.appender.LIMIT_BYTES", 10_000)
    journal = Journal(small_disk / FILE_NAME)
    large = Warned(time=1.0, message="x" * 4000)
    while not journal.trouble:
        journal.append(large)
    for _ in range(3):
        journal.append(large)
    assert "memory is full, too" in journal.trouble
    (small_disk / "ballast").unlink()
    journal.append(EVENTS[0])
    assert (journal.trouble, journal.missing) == ("", 2)
    assert list(read(small_disk / FILE_NAME))[-2:] == [large, EVENTS[0]]
    journal.close()


def test_a_log_never_fails(small_disk: Path) -> None:
    log = Log(small_disk / "log.txt")
    console, handler = rich.console.Console(file=cast("IO[str]", log)), logging.StreamHandler(log)
    while not log.missing:
        console.print("x" * 60)
    handler.handle(logging.LogRecord("name", logging.INFO, "", 0, "said", None, None))
    assert log.missing == 2
    (small_disk / "ballast").unlink()
    console.print("the end")
    log.close()
    handler.handle(logging.LogRecord("name", logging.INFO, "", 0, "too late", None, None))
    assert (small_disk / "log.txt").read_text().splitlines()[-3:] == ["x" * 60, "said", "the end"]

"""The journal keeps every appended event, whatever happens to the process that appended it."""

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
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import UsageError
from pipeline.events import AnyEvent, Metrics, Point, RunClosed, Warned, event_from_json, event_to_json
from pipeline.recording.appender import Log
from pipeline.recording.journal import FILE_NAME, Journal, ending, is_open, read

EVENTS: list[AnyEvent] = [
    Metrics(time=1.5, step=1, epoch=1, points=(Point("train/loss", 1, 0.5), Point("train/loss", 2, float("inf")))),
    Warned(time=2.0, message="two\nlines, \u00fcml\u00e4ut"),
    RunClosed(time=3.0, status="FINISHED"),
]

WRITER = """
import sys
from pathlib import Path
from pipeline.events import Warned
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


def write(path: Path, events: list[AnyEvent]) -> None:
    journal = Journal(path)
    for event in events:
        journal.append(event)
    journal.close()


def test_what_is_appended_is_read_back_in_order(path: Path) -> None:
    write(path, EVENTS)
    assert list(read(path)) == EVENTS


def test_one_event_is_one_line(path: Path) -> None:
    write(path, EVENTS)
    assert len(path.read_text().splitlines()) == len(EVENTS)


@given(st.text(), st.floats(allow_nan=False), st.floats(allow_nan=False, allow_infinity=False, min_value=0))
def test_every_event_survives_its_line(text: str, value: float, time: float) -> None:
    for event in (Warned(time=time, message=text), Metrics(time=time, step=1, epoch=1, points=(Point("m", 1, value),))):
        line = event_to_json(event)
        assert b"\n" not in line
        assert event_from_json(line) == event


def test_an_appended_event_is_readable_while_the_journal_is_open(path: Path) -> None:
    journal = Journal(path)
    journal.append(EVENTS[0])
    assert list(read(path)) == EVENTS[:1]
    journal.close()


def test_closing_twice_is_harmless(path: Path) -> None:
    journal = Journal(path)
    journal.close()
    journal.close()


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


@pytest.mark.parametrize("kept", range(1, 40, 13))
def test_a_torn_last_line_counts_as_not_written(path: Path, kept: int) -> None:
    write(path, EVENTS)
    whole = len(event_to_json(EVENTS[0])) + 1
    os.truncate(path, whole + kept)
    assert list(read(path)) == EVENTS[:1]


def test_a_last_line_without_its_end_counts_as_not_written(path: Path) -> None:
    write(path, EVENTS)
    os.truncate(path, path.stat().st_size - 1)
    assert list(read(path)) == EVENTS[:-1]


def test_appending_to_a_torn_journal_loses_only_the_torn_event(path: Path) -> None:
    write(path, EVENTS)
    os.truncate(path, path.stat().st_size - 5)
    write(path, [Warned(time=9.0, message="resumed")])
    assert list(read(path)) == [*EVENTS[:-1], Warned(time=9.0, message="resumed")]


def test_a_damaged_line_in_the_middle_is_named(path: Path) -> None:
    write(path, EVENTS)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], lines[1][:20] + b"\n", lines[2]]))
    with pytest.raises(UsageError, match=rf"{FILE_NAME}:2: this line is damaged"):
        list(read(path))


def test_a_missing_journal_is_an_error_of_the_caller(path: Path) -> None:
    with pytest.raises(UsageError, match="no such journal"):
        list(read(path))


def test_two_drivers_cannot_write_the_same_journal(path: Path) -> None:
    first = Journal(path)
    with pytest.raises(UsageError, match="still going on"):
        Journal(path)
    first.close()
    Journal(path).close()


def test_the_ending_of_a_run_is_its_last_line(path: Path) -> None:
    write(path, EVENTS[:-1])
    assert ending(path) is None
    write(path, EVENTS[-1:])
    assert ending(path) == EVENTS[-1]
    os.truncate(path, path.stat().st_size - 1)
    assert ending(path) is None


@pytest.mark.parametrize("torn", [b'{"kind":"warned","time":1', b"\0" * 4096, b'{"kind"\n'])
def test_what_a_crash_has_left_is_cut_before_appending(path: Path, torn: bytes) -> None:
    write(path, EVENTS[:1])
    with path.open("ab") as file:
        file.write(torn)
    write(path, EVENTS[1:])
    assert list(read(path)) == EVENTS


def test_an_event_of_another_version_is_not_cut(path: Path) -> None:
    write(path, EVENTS[:1])
    with path.open("ab") as file:
        file.write(b'{"kind":"from the future","time":1}\n')
    before = path.read_bytes()
    write(path, EVENTS[1:2])
    assert path.read_bytes().startswith(before)


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


def test_a_deleted_journal_is_trouble(path: Path) -> None:
    journal = Journal(path)
    journal.append(EVENTS[0])
    path.unlink()
    journal.append(EVENTS[1])
    assert journal.trouble.startswith("it was deleted")
    assert journal.missing == 1
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

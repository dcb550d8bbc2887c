"""The journal keeps every appended event, whatever happens to the process that appended it."""

# promise: one driver writes a run, on any file system

import errno
import fcntl
import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import UsageError
from pipeline.protocol.events import AnyEvent, Metrics, Point, RunClosed, Warned, event_from_json, event_to_json
from pipeline.record import journal
from pipeline.record.journal import FILE_NAME, Journal, ending, read

EVENTS: list[AnyEvent] = [
    Metrics(time=1.5, step=1, epoch=1, points=(Point("train/loss", 1, 0.5), Point("train/loss", 2, float("inf")))),
    Warned(time=2.0, message="two\nlines, \u00fcml\u00e4ut"),
    RunClosed(time=3.0, status="FINISHED"),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / FILE_NAME


def write(path: Path, events: list[AnyEvent]) -> None:
    journal = Journal(path)
    for event in events:
        journal.append(event)
    journal.close()


def test_what_is_appended_is_read_back_in_order(path: Path) -> None:
    write(path, EVENTS)
    assert list(read(path)) == EVENTS
    assert len(path.read_text().splitlines()) == len(EVENTS)


@given(st.text(), st.floats(allow_nan=False), st.floats(min_value=0, max_value=2e11))
def test_every_event_survives_its_line(text: str, value: float, time: float) -> None:
    for event in (Warned(time=time, message=text), Metrics(time=time, step=1, epoch=1, points=(Point("m", 1, value),))):
        line = event_to_json(event)
        assert b"\n" not in line
        assert event_from_json(line) == event


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_json_lacks_is_valid_json_and_read_back(value: float) -> None:
    event = Metrics(time=1.0, step=1, epoch=1, points=(Point("m", 1, value),))
    line = event_to_json(event).decode()
    json.loads(line, parse_constant=pytest.fail)
    of_before = line.replace(f'"{json.dumps(value)}"', json.dumps(value))
    for written in (line, of_before):
        read_back = event_from_json(written)
        assert isinstance(read_back, Metrics)
        assert repr(read_back.points) == repr(event.points)


def test_an_appended_event_is_readable_while_the_journal_is_open_which_may_be_closed_twice(path: Path) -> None:
    journal = Journal(path)
    journal.append(EVENTS[0])
    assert list(read(path)) == EVENTS[:1]
    journal.close()
    journal.close()


@pytest.mark.parametrize("missing", [1, 5, 14, 27])
def test_a_torn_last_line_counts_as_not_written_and_costs_no_other_when_the_journal_goes_on(
    path: Path, missing: int
) -> None:
    write(path, EVENTS)
    os.truncate(path, path.stat().st_size - missing)
    assert list(read(path)) == EVENTS[:-1]
    write(path, [Warned(time=9.0, message="resumed")])
    assert list(read(path)) == [*EVENTS[:-1], Warned(time=9.0, message="resumed")]


def test_a_damaged_line_in_the_middle_and_a_missing_journal_are_named(path: Path) -> None:
    with pytest.raises(UsageError, match="no such journal"):
        list(read(path))
    write(path, EVENTS)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], lines[1][:20] + b"\n", lines[2]]))
    with pytest.raises(UsageError, match=rf"{FILE_NAME}:2: this line is damaged"):
        list(read(path))
    path.write_bytes(b"{}\n" + lines[1])
    with pytest.raises(UsageError, match=r":1: this line is damaged. Remove the run: .* --keep-mlflow"):
        list(read(path))


def refuse(error: int) -> Callable[..., None]:
    def flock(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    return flock


@pytest.mark.parametrize(
    "flock",
    [None, refuse(errno.ENOSYS), refuse(errno.ENOLCK), refuse(errno.EOPNOTSUPP)],
    ids=["local", "Lustre", "NFS without locks", "FUSE"],
)
def test_two_drivers_cannot_write_the_same_journal_on_any_file_system(
    path: Path, flock: Callable[..., None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "BEAT_S", 0.05)
    if flock:
        monkeypatch.setattr(fcntl, "flock", flock)
    first = Journal(path)
    with pytest.raises(UsageError, match=rf"still running in process {os.getpid()} on .+ \(since .+\)\. Wait for it"):
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

"""A journal read while it is written: in order, each event once, even if it is deleted."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from pydantic import ValidationError

from pipeline.protocol.events import AnyEvent, Metrics, Point, RunClosed, Warned, event_to_json
from pipeline.record.journal import FILE_NAME, Feed, Journal


def metrics(step: int) -> Metrics:
    return Metrics(time=step / 3, step=step, epoch=1, points=(Point("loss", step, 1 / step), Point("rate", step, 0.1)))


class Lab:
    """A journal and its reader."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME
        self.journal = Journal(self.path)
        self.feed = Feed(self.path)
        self.steps = 0

    def record(self, count: int) -> None:
        for _ in range(count):
            self.steps += 1
            self.journal.append(metrics(self.steps))

    def take(self, count: int) -> list[AnyEvent | None]:
        return [self.feed.get(timeout_s=0) for _ in range(count)]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path)
    with closing(lab.journal):
        yield lab
    lab.feed.close()


def expected(first: int, last: int) -> list[Metrics]:
    return [metrics(step) for step in range(first, last + 1)]


def test_what_waits_is_counted(lab: Lab) -> None:
    lab.record(1000)
    assert len(lab.feed) == 1000
    assert lab.take(990) == expected(1, 990)
    lab.record(5)
    assert len(lab.feed) == 15
    assert lab.take(15) == expected(991, 1005)
    assert len(lab.feed) == 0


@pytest.mark.parametrize("taken", [1, 3, 4, 11])
def test_order_is_kept_while_both_sides_go_on(lab: Lab, taken: int) -> None:
    got = []
    for _ in range(20):
        lab.record(7)
        got += lab.take(min(taken, len(lab.feed)))
    got += lab.take(len(lab.feed))
    assert got == expected(1, 140)


def test_a_line_counts_once_it_is_whole(lab: Lab) -> None:
    line = event_to_json(metrics(1)) + b"\n"
    with lab.path.open("ab", buffering=0) as file:
        file.write(line[:20])
        with pytest.raises(TimeoutError):
            lab.take(1)
        file.write(line[20:])
    assert lab.take(1) == expected(1, 1)


def test_a_damaged_line_is_an_error_and_no_silence(lab: Lab) -> None:
    lab.record(1)
    with lab.path.open("ab", buffering=0) as file:
        file.write(b"{}\n")
    assert lab.take(1) == expected(1, 1)
    with pytest.raises(ValidationError):
        lab.take(1)


def test_the_end_comes_after_everything(lab: Lab) -> None:
    lab.record(10)
    lab.feed.end()
    assert lab.take(10) == expected(1, 10)
    assert lab.take(2) == [None, None]


def test_that_an_earlier_run_was_over_is_over(lab: Lab) -> None:
    """Of a continued run only the new end counts, which the journal may have no room for."""
    end = RunClosed(time=1, status="KILLED")
    lab.record(1)
    lab.journal.append(end)
    lab.record(1)
    lab.journal.append(end)
    lab.feed.end(end.model_copy(update={"status": "FINISHED"}))
    assert lab.take(4) == [metrics(1), metrics(2), end.model_copy(update={"status": "FINISHED"}), None]


def test_a_last_line_that_a_power_failure_has_torn_is_left_out(lab: Lab) -> None:
    lab.record(1)
    with lab.path.open("ab", buffering=0) as file:
        file.write(b'{"kind":"met\0\0\0\n')
    lab.feed.end()
    assert lab.take(2) == [metrics(1), None]


def test_waiting_has_a_limit(lab: Lab) -> None:
    with pytest.raises(TimeoutError):
        lab.feed.get(timeout_s=0.01)


def test_a_journal_that_is_deleted_is_read_to_its_end(lab: Lab) -> None:
    lab.record(10)
    lab.path.unlink()
    with pytest.raises(FileNotFoundError):
        lab.record(1)
    assert lab.take(11) == expected(1, 11)


def test_events_of_any_kind_pass_while_they_are_written(lab: Lab) -> None:
    """The reader waits for the writer, for ever if it must."""
    events: list[AnyEvent] = [Warned(time=0, message="Größe \n \u2028 👀" * step) for step in range(1, 60)]

    def write() -> None:
        for event in events:
            lab.journal.append(event)
            time.sleep(0.001)
        lab.feed.end()

    writer = threading.Thread(target=write)
    writer.start()
    got = list(iter(lab.feed.get, None))
    writer.join()
    assert got == events

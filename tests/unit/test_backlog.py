"""Events that wait for a store: in order, each once, however many there are and whatever the disk does."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from pipeline.events import AnyEvent, Metrics, Point, Warned
from pipeline.recording import backlog
from pipeline.recording.backlog import Backlog
from pipeline.recording.journal import FILE_NAME, Journal


def metrics(step: int) -> Metrics:
    return Metrics(time=step / 3, step=step, epoch=1, points=(Point("loss", step, 1 / step), Point("rate", step, 0.1)))


class Lab:
    """A journal and the backlog behind it, as a recorder uses both."""

    def __init__(self, folder: Path) -> None:
        self.full = False
        self.path = folder / FILE_NAME
        self.journal = Journal(self.path)
        self.backlog = Backlog(self.path, is_written=lambda: not self.full)
        self.steps = 0

    def record(self, count: int, *, journaled: bool = True) -> None:
        for _ in range(count):
            self.steps += 1
            if journaled:
                self.journal.append(metrics(self.steps))
            self.backlog.put(metrics(self.steps))

    def take(self, count: int) -> list[AnyEvent | None]:
        return [self.backlog.get(timeout_s=0) for _ in range(count)]

    @property
    def in_memory(self) -> int:
        return sum(isinstance(each, Metrics) for each in self.backlog._waiting)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.setattr(backlog, "LIMIT_POINTS", 6)  # three events
    lab = Lab(tmp_path)
    with closing(lab.journal):
        yield lab


def expected(first: int, last: int) -> list[Metrics]:
    return [metrics(step) for step in range(first, last + 1)]


@pytest.mark.deep
def test_memory_holds_a_few_and_the_journal_the_others(lab: Lab) -> None:
    lab.record(1000)
    assert lab.in_memory == 3
    assert len(lab.backlog._waiting) == 4  # and one part of the file
    assert len(lab.backlog) == 1000
    assert lab.take(1000) == expected(1, 1000)
    assert len(lab.backlog) == 0


@pytest.mark.parametrize("taken", [1, 3, 4, 11])
def test_order_is_kept_while_both_sides_go_on(lab: Lab, taken: int) -> None:
    got = []
    for _ in range(20):
        lab.record(7)
        got += lab.take(min(taken, len(lab.backlog)))
    got += lab.take(len(lab.backlog))
    assert got == expected(1, 140)


def test_what_a_full_disk_has_not_taken_stays_in_memory(lab: Lab) -> None:
    """And what comes when it has room again is found behind it, whatever has been written meanwhile."""
    lab.record(10)
    lab.full = True
    lab.record(20, journaled=False)
    assert lab.in_memory == 23
    for step in range(11, 31):  # room again: what waited is written first
        lab.journal.append(metrics(step))
    lab.full = False
    lab.record(10)
    assert lab.in_memory == 23
    assert lab.take(40) == expected(1, 40)


def test_the_end_comes_after_everything(lab: Lab) -> None:
    lab.record(10)
    lab.backlog.close()
    assert lab.take(10) == expected(1, 10)
    assert lab.take(2) == [None, None]


def test_waiting_has_a_limit(lab: Lab) -> None:
    with pytest.raises(TimeoutError):
        lab.backlog.get(timeout_s=0.01)


def test_a_deleted_journal_is_an_error_and_no_silence(lab: Lab) -> None:
    lab.record(10)
    lab.path.unlink()
    lab.record(1, journaled=False)
    assert lab.take(3) == expected(1, 3)
    with pytest.raises(FileNotFoundError):
        lab.take(1)


def test_events_of_any_kind_and_thread_pass(lab: Lab) -> None:
    """The reader waits for the writer, for ever if it must."""
    events: list[AnyEvent] = [Warned(time=0, message="Größe \n \u2028 👀" * step) for step in range(1, 60)]

    def write() -> None:
        for event in events:
            lab.journal.append(event)
            lab.backlog.put(event)
            time.sleep(0.001)
        lab.backlog.close()

    writer = threading.Thread(target=write)
    writer.start()
    got = list(iter(lab.backlog.get, None))
    writer.join()
    assert got == events

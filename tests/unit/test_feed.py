"""A journal read while it is written: in order, each event once, from an offset."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from pipeline.protocol.events import AnyEvent, Metrics, Point, Warned, event_to_json
from pipeline.record.journal import FILE_NAME, Journal, Tail
from pipeline.tracking.store import TrackingOutcome


def metrics(step: int) -> AnyEvent:
    """An event of a step; each fifth one has lines, and signs outside of ASCII."""
    if step % 5 == 0:
        return Warned(time=step, message="Größe \n \u2028 👀" * step)
    return Metrics(time=step / 3, step=step, epoch=1, points=(Point("loss", step, 1 / step), Point("rate", step, 0.1)))


class Lab:
    """A journal and its reader."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME
        self.journal = Journal(self.path)
        self.tail = Tail(self.path)
        self.steps = 0

    def record(self, count: int) -> None:
        for _ in range(count):
            self.steps += 1
            self.journal.append(metrics(self.steps))

    def take(self, count: int) -> list[AnyEvent]:
        return [event for _, event in zip(range(count), self.tail.new(), strict=False)]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path)
    with closing(lab.journal):
        yield lab


def expected(first: int, last: int) -> list[AnyEvent]:
    return [metrics(step) for step in range(first, last + 1)]


def test_what_waits_is_counted(lab: Lab) -> None:
    lab.record(1000)
    assert TrackingOutcome().waiting(lab.path.parent) == "1,000 events"
    assert lab.take(990) == expected(1, 990)
    lab.record(5)
    assert TrackingOutcome(offset=lab.tail.offset).waiting(lab.path.parent) == "15 events"
    assert lab.take(99) == expected(991, 1005)
    assert TrackingOutcome(offset=lab.tail.offset).waiting(lab.path.parent) == ""


@pytest.mark.parametrize("taken", [1, 3, 4, 11])
def test_order_is_kept_while_both_sides_go_on_and_readers_are_replaced(lab: Lab, taken: int) -> None:
    got = []
    for _ in range(20):
        lab.record(7)
        got += lab.take(taken)
        lab.tail = Tail(lab.path, offset=lab.tail.offset)
    got += lab.take(999)
    assert got == expected(1, 140)


def test_a_line_counts_once_it_is_whole(lab: Lab) -> None:
    lab.record(1)
    assert lab.take(9) == expected(1, 1)
    line = event_to_json(metrics(2)) + b"\n"
    with lab.path.open("ab", buffering=0) as file:
        file.write(line[:20])
        assert lab.take(1) == []
        file.write(line[20:])
    assert lab.take(9) == expected(2, 2)


def test_an_offset_in_the_middle_of_a_line_is_that_of_another_journal(lab: Lab) -> None:
    lab.record(3)
    assert list(Tail(lab.path, offset=20).new()) == expected(1, 3)
    assert list(Tail(lab.path, offset=10**6).new()) == expected(1, 3)


def test_a_damaged_line_takes_no_others_with_it(lab: Lab) -> None:
    lab.record(1)
    with lab.path.open("ab", buffering=0) as file:
        file.write(b'{"kind":"met\0\0\0\n')
    lab.record(1)
    assert lab.take(9) == expected(1, 2)

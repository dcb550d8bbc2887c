"""The one place that all events pass through."""

import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from samples import finished, spread

from pipeline.errors import UsageError
from pipeline.protocol.events import (
    Advanced,
    AnyEvent,
    Heartbeat,
    Metrics,
    Phase,
    Point,
    SystemMetrics,
    TrialOpened,
    Warned,
)
from pipeline.protocol.trial import Rank
from pipeline.record.journal import FILE_NAME, is_open, read
from pipeline.record.recorder import Recorder


class Listener:
    """Notes each event, and what the journal held when it came."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[AnyEvent] = []
        self.journaled: list[AnyEvent] = []

    def receive(self, event: AnyEvent) -> None:
        self.events.append(event)
        self.journaled = list(read(self.folder / FILE_NAME))


def opened(name: str) -> TrialOpened:
    return TrialOpened(time=0.0, trial=name, role="main", title=name, tags={}, params={})


def test_an_event_is_in_the_journal_before_anyone_hears_of_it(tmp_path: Path) -> None:
    listener = Listener(tmp_path)
    recorder = Recorder(tmp_path, subscribers=[listener])
    for event in (opened("main"), Warned(time=1.0, message="careful"), finished("main", spread(1.0))):
        recorder.receive(event)
        assert listener.journaled == listener.events
    recorder.close()
    assert len(listener.events) == 3


def test_what_is_for_displays_alone_is_heard_and_not_journaled(tmp_path: Path) -> None:
    listener = Listener(tmp_path)
    recorder = Recorder(tmp_path, subscribers=[listener])
    beat = Heartbeat(time=1.0, rank=Rank(), pid=1, step=1, phase=Phase.FORWARD, idle_s=0)
    recorder.receive(beat)
    recorder.receive(Advanced(time=2.0, what="evaluating", done=1))
    recorder.close()
    assert [event.kind for event in listener.events] == ["heartbeat", "advanced"]
    assert listener.journaled == []


def test_what_the_journal_refuses_nobody_hears(tmp_path: Path) -> None:
    listener = Listener(tmp_path)
    recorder = Recorder(tmp_path, subscribers=[listener])
    recorder.close()
    with pytest.raises(ValueError, match="closed file"):
        recorder.receive(Warned(time=1.0, message="too late"))
    assert not listener.events


def test_events_come_from_any_thread_one_at_a_time(tmp_path: Path) -> None:
    inside = threading.Lock()

    class Alone:
        def receive(self, event: AnyEvent) -> None:
            assert inside.acquire(blocking=False)
            inside.release()

    recorder = Recorder(tmp_path, subscribers=[Alone(), Listener(tmp_path)])

    def send(number: int) -> None:
        for _ in range(20):
            recorder.receive(Warned(time=0.0, message=str(number)))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()
    assert len(list(read(tmp_path / FILE_NAME))) == 80


def metrics(*steps: int, trial: str = "main", repeat: int = 0, name: str = "train/loss") -> Metrics:
    points = tuple(Point(name, step, 1 / step) for step in steps)
    return Metrics(time=0.0, trial=trial, step=steps[-1], epoch=1, points=points, repeat=repeat)


def load(*steps: int, node: str = "one") -> list[SystemMetrics]:
    return [SystemMetrics(time=0.0, node=node, points=(Point(f"system/{node}/cpu", step, 1.0),)) for step in steps]


def recorded(folder: Path, events: Sequence[AnyEvent]) -> Recorder:
    """A session of a run."""
    recorder = Recorder(folder, subscribers=[])
    for event in events:
        recorder.receive(event)
    recorder.close()
    return recorder


def steps_in(folder: Path, *, trial: str = "main", name: str = "train/loss") -> list[int]:
    events = [event for event in read(folder / FILE_NAME) if isinstance(event, Metrics | SystemMetrics)]
    return [point.step for event in events if event.trial == trial for point in event.points if point.name == name]


def test_steps_that_a_resumed_run_does_again_leave_no_second_points(tmp_path: Path) -> None:
    recorded(tmp_path, [opened("main"), metrics(1, 2), metrics(3, 4), metrics(2, name="validation/loss")])
    listener = Listener(tmp_path)
    recorder = Recorder(tmp_path, subscribers=[listener])
    again = [opened("main"), metrics(2, 3), metrics(2, name="validation/loss"), metrics(4, 5), metrics(6)]
    for event in again:
        recorder.receive(event)
    recorder.close()

    assert recorder.is_resumed
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert steps_in(tmp_path, name="validation/loss") == [2]
    assert listener.events == [
        opened("main"),
        Metrics(time=0.0, step=5, epoch=1, points=(Point("train/loss", 5, 1 / 5),)),
        metrics(6),
    ]


def test_a_trial_that_starts_again_leaves_no_second_points_and_repeats_are_no_steps_done_again(tmp_path: Path) -> None:
    repeats = [opened("cell").model_copy(update={"repeat": repeat}) for repeat in (0, 1)]
    cells = [repeats[0], metrics(1, 2, trial="cell"), repeats[1], metrics(1, 2, trial="cell", repeat=1)]
    recorded(tmp_path, [opened("main"), metrics(1, 2, 3), metrics(2, 3, 4), *cells])
    assert steps_in(tmp_path) == [1, 2, 3, 4]
    assert steps_in(tmp_path, trial="cell") == [1, 2, 1, 2]


def test_what_the_driver_says_about_a_finished_trial_is_kept_and_said_once(tmp_path: Path) -> None:
    measured = [opened("cell"), metrics(1, 2, trial="cell"), finished("cell", spread(1.0))]
    summary = metrics(2, trial="cell")
    recorded(tmp_path, [*measured, summary])
    assert steps_in(tmp_path, trial="cell") == [1, 2, 2]
    recorded(tmp_path, [summary])  # a driver that was killed while it reported
    assert steps_in(tmp_path, trial="cell") == [1, 2, 2]


def test_samples_of_a_nodes_load_are_counted_on(tmp_path: Path) -> None:
    recorded(tmp_path, [*load(0, 1, 2), *load(0, 1, node="two")])
    recorded(tmp_path, [*load(0, 1), *load(0, node="two"), *load(2), *load(0, 1)])
    assert steps_in(tmp_path, name="system/one/cpu") == list(range(8))
    assert steps_in(tmp_path, name="system/two/cpu") == list(range(3))


def test_trials_that_had_ended_are_known_and_one_that_is_done_again_counts_once(tmp_path: Path) -> None:
    first, second = finished("baseline", spread(1.0)), finished("baseline", spread(2.0))
    recorded(tmp_path, [opened("baseline"), first, opened("main")])
    assert [end.result for end in recorded(tmp_path, []).earlier] == [first.result]
    recorded(tmp_path, [opened("baseline")])  # and has not ended
    assert recorded(tmp_path, []).earlier == ()
    recorded(tmp_path, [opened("baseline"), second])
    assert [end.result for end in recorded(tmp_path, []).earlier] == [second.result]


def test_a_damaged_journal_is_not_continued_and_not_locked(tmp_path: Path) -> None:
    recorded(tmp_path, [opened("main")])
    path = tmp_path / FILE_NAME
    path.write_bytes(b"damaged\n" + path.read_bytes())
    with pytest.raises(UsageError, match="damaged"):
        Recorder(tmp_path, subscribers=[])
    assert not is_open(path)


def test_who_subscribes_to_a_block_hears_what_happens_in_it(tmp_path: Path) -> None:
    listener = Listener(tmp_path)
    recorder = Recorder(tmp_path, subscribers=[])
    recorder.receive(Warned(time=1.0, message="before"))
    with recorder.subscribed(listener):
        recorder.receive(Warned(time=1.0, message="inside"))
    recorder.receive(Warned(time=1.0, message="after"))
    recorder.close()
    assert listener.events == [Warned(time=1.0, message="inside")]


def test_an_event_that_can_t_be_journaled_is_an_error_and_is_shown_all_the_same(tmp_path: Path) -> None:
    told: list[AnyEvent] = []
    listener: Any = SimpleNamespace(receive=told.append)
    recorder = Recorder(tmp_path, subscribers=[listener])
    (tmp_path / FILE_NAME).unlink()
    with pytest.raises(FileNotFoundError, match="it was deleted"):
        recorder.receive(Warned(time=1.0, message="x"))
    recorder.close()
    assert len(told) == 1

"""The one place that all events pass through."""

import threading
from pathlib import Path
from typing import Any

import pytest
from samples import finished, spread

from pipeline.contract import Rank
from pipeline.events import AnyEvent, Failed, Finished, FirstStep, TrialOpened, Warned
from pipeline.recording.journal import FILE_NAME, read
from pipeline.recording.recorder import Recorder


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


def failed(error: str) -> Failed:
    return Failed(time=0.0, rank=Rank(), error=error, traceback="")


def test_an_event_is_in_the_journal_before_anyone_hears_of_it(tmp_path: Path) -> None:
    listener = Listener(tmp_path)
    recorder = Recorder(tmp_path, subscribers=[listener])
    for event in (opened("main"), Warned(time=1.0, message="careful"), finished("main", spread(1.0))):
        recorder.receive(event)
        assert listener.journaled == listener.events
    recorder.close()
    assert len(listener.events) == 3


def test_what_the_journal_refuses_nobody_hears(tmp_path: Path) -> None:
    listener = Listener(tmp_path)
    recorder = Recorder(tmp_path, subscribers=[listener])
    recorder.close()
    with pytest.raises(ValueError, match="closed file"):
        recorder.receive(Warned(time=1.0, message="too late"))
    assert not listener.events


def test_the_time_to_the_first_step_is_the_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("pipeline.recording.recorder.time.monotonic", lambda: now)
    recorder = Recorder(tmp_path, subscribers=[])
    end = finished("main", spread(1.0)).model_copy(update={"time_to_first_step_s": None})
    recorder.receive(opened("baseline"))
    now = 107.5
    recorder.receive(FirstStep(time=0.0))
    now = 110.0
    recorder.receive(end)
    recorder.receive(opened("main"))
    recorder.receive(end)
    recorder.close()

    ends: list[Any] = [event for event in read(tmp_path / FILE_NAME) if isinstance(event, Finished)]
    assert [event.time_to_first_step_s for event in ends] == [7.5, None]  # the second trial never took a step
    assert recorder.finished == ends


def test_failures_are_those_of_the_last_trial(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, subscribers=[])
    recorder.receive(opened("baseline"))
    recorder.receive(failed("one"))
    recorder.receive(failed("two"))
    first = recorder.failures
    recorder.receive(opened("main"))
    recorder.close()

    assert [failure.error for failure in first] == ["one", "two"]
    assert recorder.failures == []


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

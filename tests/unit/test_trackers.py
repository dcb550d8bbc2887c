"""A user's own trackers: what they get, and that nothing that happens in them reaches a run."""

import threading
from contextlib import closing
from pathlib import Path

import pytest

from pipeline.drive import preflight
from pipeline.errors import ExperimentError
from pipeline.experiment.load import load
from pipeline.protocol.events import Advanced, AnyEvent, Warned
from pipeline.record.recorder import Recorder
from pipeline.tracking.loggers import Logger


class Notes:
    """Keeps what it gets; waits for ``gate``, and raises at the message ``fault``."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.gate = threading.Event()
        self.gate.set()
        self.messages: list[str] = []
        self.is_closed = False

    def receive(self, event: AnyEvent) -> None:
        self.gate.wait(20)
        assert isinstance(event, Warned)
        if event.message == self.fault:
            raise ConnectionError("no such\n  host: https://me:pa55@metrics.example")
        self.messages.append(event.message)

    def close(self) -> None:
        self.is_closed = True


def followed(folder: Path, tracker: Notes, told: list[str], *messages: str) -> Logger:
    """A tracker of a run in which these messages came; an empty text is told when it has ended."""
    over = threading.Event()
    with closing(Recorder(folder, subscribers=[])) as recorder:
        subscriber = Logger(
            "lab.Notes", lambda: tracker, folder=folder, is_over=over.is_set, end=lambda: None,
            tell=lambda _, text: told.append(text),
            remedy="All events are in its journal",
        )  # fmt: skip
        for message in messages:
            recorder.receive(Warned(time=0, message=message))
            recorder.receive(Advanced(time=0, what="reading", done=1))  # for terminals only
    over.set()
    return subscriber


def test_a_tracker_gets_all_events_in_order_and_is_closed(tmp_path: Path) -> None:
    notes, told = Notes(), list[str]()
    followed(tmp_path, notes, told, "one", "two", "three").join()
    assert (notes.messages, notes.is_closed, told) == (["one", "two", "three"], True, [""])
    resumed = Notes()  # of a run that goes on
    followed(tmp_path, resumed, told, "four").join()
    assert resumed.messages == ["one", "two", "three", "four"]


def test_a_slow_tracker_holds_nobody_up(tmp_path: Path) -> None:
    notes, told = Notes(), list[str]()
    notes.gate.clear()
    subscriber = followed(tmp_path, notes, told, "one", "two")
    assert (notes.messages, told) == ([], [])
    notes.gate.set()
    subscriber.join()
    assert notes.messages == ["one", "two"]


def test_a_tracker_that_raises_is_told_of_once_and_left_out(tmp_path: Path) -> None:
    notes, told = Notes(fault="two"), list[str]()
    followed(tmp_path, notes, told, "one", "two", "three").join()
    assert (notes.messages, notes.is_closed) == (["one"], False)
    message, ended = told
    assert ended == ""
    assert message.startswith("lab.Notes raised ConnectionError: no such host: https://")
    assert message.split(". ")[0].endswith("metrics.example")
    assert "It gets no further events" in message
    assert "pa55" not in message


def test_its_arguments_are_checked_before_anything_starts(tmp_path: Path) -> None:
    mlp = Path(__file__).parents[2] / "experiments" / "mlp.yaml"
    with pytest.raises(ExperimentError) as caught:
        preflight.check(load(mlp, ["tracking.loggers=[{_target_: torch.nn.Softmax, dimm: 1}]"]))
    (problem,) = caught.value.problems
    assert problem.key == "tracking.loggers[0].dimm"

"""Progress of lengthy tasks: what is told, how often, and from where."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch

from pipeline.data import make_once
from pipeline.protocol import progress
from pipeline.protocol.events import Advanced, Warned
from pipeline.protocol.progress import ProgressReporter, report_progress_to
from pipeline.record.journal import FILE_NAME, read
from pipeline.record.recorder import Recorder


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Advanced | Warned]]:
    """All that is told, without thinning out."""
    events: list[Advanced | Warned] = []
    monkeypatch.setattr(progress, "_EVERY_S", 0.0)
    with report_progress_to(events.append, trial="baseline"):
        yield events


def test_each_step_is_told_and_the_end_closes_it(told: list[Advanced]) -> None:
    with ProgressReporter("evaluating", total=10, unit="samples") as one:
        one.by(4)
        one.by(4)
        one.by(4)  # the last batch may be padded

    assert [(event.done, event.total) for event in told] == [(4, 10), (8, 10), (10, 10), (10, 10)]
    assert {(event.what, event.unit, event.trial) for event in told} == {("evaluating", "samples", "baseline")}


def test_work_that_fails_or_has_no_total_is_closed_too(told: list[Advanced]) -> None:
    def divide() -> None:
        with ProgressReporter("dividing") as one:
            one.to(3)
            _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        divide()
    assert [(event.done, event.total) for event in told] == [(3, None), (3, 3)]


def test_what_is_quick_silent_or_unheard_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Advanced | Warned] = []
    with report_progress_to(events.append), ProgressReporter("evaluating", total=1000) as one:
        for _ in range(1000):
            one.by(1)
    monkeypatch.setattr(progress, "_EVERY_S", 0.0)
    with report_progress_to(events.append), ProgressReporter("evaluating", silent=True) as one:
        one.by(1)
    with ProgressReporter("evaluating") as one:
        one.by(1)
    assert events == []


def test_the_journal_keeps_nothing_of_it_but_others_hear(tmp_path: Path) -> None:
    heard: list[object] = []

    class Listener:
        def receive(self, event: object) -> None:
            heard.append(event)

    event = Advanced(time=1, what="evaluating", done=1, total=2)
    with closing(Recorder(tmp_path, subscribers=[Listener()])) as recorder:
        recorder.receive(event)

    assert heard == [event]
    assert list(read(tmp_path / FILE_NAME)) == []


def test_what_is_made_once_draws_from_generators_of_its_own(told: list[Advanced | Warned], tmp_path: Path) -> None:
    def write(path: Path) -> None:
        path.write_text(str(torch.rand(3).sum()))

    file = tmp_path / "data" / "example"
    with torch.device("meta"), pytest.raises(FileNotFoundError):  # the outline of a model needs no data
        make_once(file, write, what="an example")
    assert not file.exists()
    torch.manual_seed(1)
    for _ in range(2):
        make_once(file, write, what="an example")
    drawn = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(3))
    assert [event.message for event in told if isinstance(event, Warned)] == [
        f"{file} does not exist. Making an example."
    ]
    assert [path.name for path in file.parent.iterdir()] == ["example"]


def test_what_several_ranks_need_at_once_is_made_once(told: list[Advanced | Warned], tmp_path: Path) -> None:
    def write(path: Path) -> None:
        time.sleep(0.1)  # long enough for the others to start as well, if nothing held them back
        path.write_text("made")

    file = tmp_path / "new" / "example"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: make_once(file, write, what="an example"), range(4)))

    assert file.read_text() == "made"
    assert len([event for event in told if isinstance(event, Warned)]) == 1

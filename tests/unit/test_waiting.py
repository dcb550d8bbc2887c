"""The line with what a command waits for: at once on a terminal, only for what takes long in a pipe."""

# promise: a terminal shows at once what is waited for, then a bar that moves, and what is done after the last step

import io
import threading
from collections.abc import Callable, Sequence

import pytest
import rich.console

from pipeline.record.console import stages_on
from pipeline.system import begin_stage, end_stage


def terminal(**more: object) -> rich.console.Console:
    return rich.console.Console(file=io.StringIO(), width=80, force_terminal=True, force_interactive=True, **more)


def printed(console: rich.console.Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_shows_each_stage_in_one_line_that_goes() -> None:
    console = terminal(color_system=None)
    with stages_on(console):
        begin_stage("reading the experiment")
        assert "reading the experiment ..." in printed(console)
        console.print("note: no GPU here")
        begin_stage("importing torch")
        end_stage()
        told = printed(console)
        console.print("error: no such file")
    assert told.count("\x1b[?25l") == told.count("\x1b[?25h") == 1
    assert told.endswith("\x1b[2K")  # nothing is left of it
    assert "note: no GPU here\n" in told
    assert printed(console).endswith("\x1b[2Kerror: no such file\n")


class Timer:
    """A timer whose time has come when the test says so."""

    made: list["Timer"]

    def __init__(self, seconds: float, act: Callable[..., None], arguments: Sequence[object]) -> None:
        self.seconds, self.ring, self.is_on, self.daemon = seconds, lambda: act(*arguments), False, False
        self.made.append(self)

    def start(self) -> None:
        self.is_on = True

    def cancel(self) -> None:
        self.is_on = False

    def join(self) -> None:
        assert not self.is_on


def test_a_pipe_gets_a_line_for_a_stage_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    Timer.made = []
    monkeypatch.setattr(threading, "Timer", Timer)
    console = rich.console.Console(file=io.StringIO(), width=80)
    with stages_on(console):
        begin_stage("reading the experiment")
        begin_stage("importing torch")
        reading, importing = Timer.made
        assert (reading.is_on, importing.is_on, importing.seconds) == (False, True, 5.0)
        importing.ring()
    assert not importing.is_on
    assert printed(console) == "importing torch ...\n"


def test_who_wants_no_progress_gets_none() -> None:
    console = rich.console.Console(file=io.StringIO(), quiet=True, force_terminal=True)
    with stages_on(console):
        begin_stage("importing torch")
    begin_stage("drawing the report")  # nobody listens
    assert printed(console) == ""

"""Large imports: no collection of garbage, and signals that wait."""

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pydantic import field_serializer

from pipeline import system
from pipeline.errors import Terminated, terminate
from pipeline.experiment.values import Frozen
from pipeline.system import handle_signals, hang_up, missing_user_variables, undisturbed


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    yield
    gc.enable()


def imported(*, do: Callable[[], object] = lambda: None, error: type[Exception] | None = None) -> None:
    with undisturbed():
        do()
        if error:
            raise error


def interrupt(times: int = 1, number: int = signal.SIGINT) -> None:
    for _ in range(times):
        signal.raise_signal(number)


@pytest.fixture
def restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_it_is_paused_and_goes_on_also_after_an_error() -> None:
    def nested() -> None:
        imported(do=lambda: collected.append(gc.isenabled()))
        collected.append(gc.isenabled())

    collected: list[bool] = []
    with pytest.raises(ImportError):
        imported(do=nested, error=ImportError)
    assert collected == [False, False]
    assert gc.isenabled()
    gc.disable()
    imported()
    assert not gc.isenabled(), "a collector that is off stays off"


def test_ctrl_c_waits_for_the_end_also_of_an_import_that_fails() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as caught:
        imported(do=lambda: interrupt(times=2), error=ImportError)
    assert isinstance(caught.value.__context__, ImportError)
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_again_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.system.SAME_S", 0.0)
    with pytest.raises(KeyboardInterrupt):
        imported(do=lambda: (interrupt(times=2), pytest.fail("the import goes on")))


@pytest.mark.usefixtures("restored")
def test_a_handler_that_raises_nothing_is_called_once_and_what_nobody_handles_is_left_alone() -> None:
    called = list[int]()
    signal.signal(signal.SIGTERM, lambda number, _: called.append(number))
    with undisturbed():
        interrupt(number=signal.SIGTERM)
        assert called == []
    assert called == [signal.SIGTERM]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with undisturbed():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_another_thread_may_import() -> None:
    seen = list[Any]()
    thread = threading.Thread(target=lambda: imported(do=lambda: seen.append(signal.getsignal(signal.SIGINT))))
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]


class Interrupting(Frozen):
    """Gets Ctrl-C while its serializer runs inside of pydantic's core."""

    number: int = 1

    @field_serializer("number")
    def _at_a_bad_time(self, number: int) -> int:
        signal.raise_signal(signal.SIGINT)
        return number


@pytest.mark.parametrize("write", [Interrupting.model_dump, Interrupting.model_dump_json])
def test_ctrl_c_while_something_is_serialized_is_no_error_of_it(write: Callable[[Interrupting], Any]) -> None:
    with pytest.raises(KeyboardInterrupt):
        write(Interrupting())


def test_a_closed_terminal_ends_a_run_like_sigterm() -> None:
    with handle_signals(terminate, signal.SIGTERM), handle_signals(hang_up, signal.SIGHUP), pytest.raises(Terminated):
        signal.raise_signal(signal.SIGHUP)


def test_a_user_id_without_an_entry_gets_the_variables_that_libraries_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/")
    monkeypatch.delenv("USER", raising=False)
    assert missing_user_variables() == {}
    monkeypatch.setattr(system.pwd, "getpwuid", {}.__getitem__)
    assert missing_user_variables() == {"USER": str(os.getuid())}
    monkeypatch.delenv("HOME")
    assert missing_user_variables().keys() == {"USER", "HOME"}

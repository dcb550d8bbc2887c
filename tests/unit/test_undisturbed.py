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


def test_it_is_paused_and_goes_on_also_after_an_error() -> None:
    def import_it() -> None:
        with undisturbed():
            with undisturbed():
                assert not gc.isenabled()
            assert not gc.isenabled()
            raise ImportError

    with pytest.raises(ImportError):
        import_it()
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    with undisturbed():
        pass
    assert not gc.isenabled()


def test_ctrl_c_waits_for_the_end_also_of_an_import_that_fails() -> None:
    before = signal.getsignal(signal.SIGINT)

    def import_it() -> None:
        with undisturbed():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            raise ImportError

    with pytest.raises(KeyboardInterrupt) as caught:
        import_it()
    assert isinstance(caught.value.__context__, ImportError)
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_again_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.system.SAME_S", 0.0)

    def import_it() -> None:
        with undisturbed():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            pytest.fail("the import goes on")

    with pytest.raises(KeyboardInterrupt):
        import_it()


def test_a_handler_that_raises_nothing_is_called_once() -> None:
    called = []
    before = signal.signal(signal.SIGTERM, lambda number, _: called.append(number))
    try:
        with undisturbed():
            signal.raise_signal(signal.SIGTERM)
            assert called == []
        assert called == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_that_nobody_handles_is_left_alone() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with undisturbed():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_another_thread_may_import() -> None:
    imported = []

    def work() -> None:
        with undisturbed():
            imported.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert imported == [signal.getsignal(signal.SIGINT)]


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

"""A journal has one writer, on all machines, and is free again when it has ended."""

# promise: one driver writes a run, on any file system

import os
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from test_resumed_file import experiment, run

from pipeline.drive.resume import earlier
from pipeline.errors import ResourceError, UsageError
from pipeline.protocol.events import Warned
from pipeline.record import journal
from pipeline.record.journal import FILE_NAME, Journal, describe_writer, is_open
from pipeline.record.runs import LATEST
from pipeline.system import hold_lock

Elsewhere = Callable[[Path], journal._Lock]


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"BEAT_S": 0.02, "LEASE_S": 0.4, "_LOOK_S": 0.01, "_PATIENCE_S": 0.1}.items():
        monkeypatch.setattr(journal, name, seconds)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / FILE_NAME


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Elsewhere:
    """Lock of a journal that a process on the machine node7 holds, on a file system that does not pass locks on."""

    def lock(path: Path) -> journal._Lock:
        path.touch()
        held = journal._Lock(journal._lock_of(path))
        with monkeypatch.context() as patch:
            patch.setattr(journal, "_machine", lambda: "node7's boot")
            patch.setattr(journal.fcntl, "flock", lambda *_: None)
            held._own = journal._Holder("node7", "node7's boot", os.getpid(), time.time())
            held.acquire()
        return held

    return lock


def die(lock: journal._Lock) -> None:
    """End a lock's heartbeat, as the end of its machine does."""
    lock._done.set()
    time.sleep(0.1)


def test_a_live_process_of_this_machine_is_named_and_one_that_has_ended_holds_nothing(path: Path) -> None:
    first = Journal(path)
    assert is_open(path)
    with pytest.raises(UsageError, match=rf"still running in process {os.getpid()} on .+ \(since \d{{4}}-"):
        Journal(path)
    assert f"process {os.getpid()} on " in describe_writer(path)
    os.close(first._lock._file)  # as the end of a process does
    first._lock._file = -1
    assert not is_open(path)
    Journal(path).close()
    assert not is_open(path)
    first.close()


def test_one_of_many_gets_a_free_journal(path: Path) -> None:
    start, results, journals = threading.Barrier(8), list[bool](), list[Journal]()

    def take() -> None:
        start.wait()
        try:
            journals.append(Journal(path))
        except UsageError:
            results.append(False)
        else:
            results.append(True)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [False] * 7 + [True]
    journals[0].close()


def test_a_process_on_another_machine_that_gives_signs_keeps_its_journal(path: Path, elsewhere: Elsewhere) -> None:
    lock = elsewhere(path)
    assert is_open(path)
    with pytest.raises(ResourceError, match="on node7"):
        Journal(path)
    assert lock.taken_by is None
    lock.release()
    assert not is_open(path)


def test_the_journal_of_a_machine_that_is_gone_is_taken_after_a_lease_and_not_given_back(
    path: Path, elsewhere: Elsewhere
) -> None:
    gone = elsewhere(path)
    die(gone)
    with pytest.raises(ResourceError, match=r"on node7 \(since .*If that machine is gone, try again in 0\.4 s"):
        Journal(path)
    time.sleep(0.4)
    with closing(Journal(path)):
        gone._confirmed = 0.0  # it was only paused, and has to stop now
        assert gone.taken_by is not None
        gone.release()
        assert is_open(path)


def test_a_run_whose_machine_is_gone_is_resumed_after_a_lease(
    tmp_path: Path, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = experiment("a.yaml")
    path = run(10, "a.yaml") / FILE_NAME
    (path.parent / "experiment.yaml").write_text(Path("a.yaml").read_text())
    lock = elsewhere(path)
    assert is_open(path)
    with pytest.raises(ResourceError, match=r"still running in process \d+ on node7 \(since .*Wait for it, or stop it"):
        earlier(file, LATEST)
    die(lock)
    time.sleep(0.4)
    assert earlier(file, LATEST).status == "KILLED"


def test_a_driver_that_was_paused_while_its_run_was_resumed_writes_no_more(path: Path, elsewhere: Elsewhere) -> None:
    first = Journal(path)
    die(first._lock)
    first._lock._confirmed = 0.0
    os.truncate(f"{path}.lock", 0)
    second = elsewhere(path)
    with pytest.raises(OSError, match=r"process \d+ on node7 \(since .* has resumed this run") as caught:
        first.append(Warned(message="late"))
    assert caught.value.filename == str(path)
    first.close()
    assert is_open(path)
    second.release()


def test_a_lock_for_making_a_file_is_waited_for_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with (
        hold_lock(path, patience_s=0),
        pytest.raises(TimeoutError, match="held by another"),
        hold_lock(path, patience_s=0.2),
    ):
        pass
    with hold_lock(path, patience_s=0):
        pass
    assert list(tmp_path.iterdir()) == []

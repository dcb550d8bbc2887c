"""A lock file has one holder at a time, on all machines, and is free again when its holder has ended."""

# promise: one driver writes a run, on any file system

import itertools
import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from test_resumed_file import experiment, run

from pipeline.drive.resume import LATEST, earlier
from pipeline.errors import ResourceError, UsageError
from pipeline.protocol.events import Warned
from pipeline.record.journal import FILE_NAME, Journal, is_open
from pipeline.system import lock_file, stages
from pipeline.system.lock_file import LockFile, LockHeldError, find_holder

Elsewhere = Callable[[Path], LockFile]


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"BEAT_S": 0.02, "LEASE_S": 0.3, "_POLL_S": 0.01}.items():
        monkeypatch.setattr(lock_file, name, seconds)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lock"


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Elsewhere:
    """Lock that a process on the machine node7 holds."""

    def lock(path: Path) -> LockFile:
        held = LockFile(path)
        with monkeypatch.context() as patch:
            patch.setattr(lock_file, "_machine", lambda: "node7")
            patch.setattr(lock_file.socket, "gethostname", lambda: "node7")
            held.acquire()
        return held

    return lock


def die(lock: LockFile) -> None:
    """End a lock's heartbeat, as the end of its machine does."""
    lock._beating.close()


def test_a_live_process_of_this_machine_is_named_at_once(path: Path) -> None:
    with LockFile(path) as lock:
        with pytest.raises(LockHeldError, match=rf"lock is held by process {os.getpid()} on .+ \(since \d{{4}}-"):
            LockFile(path).acquire()
        assert lock.taken_by is None
    assert find_holder(path) is None
    assert not path.exists()


def test_the_lock_of_a_process_that_has_ended_is_free_at_once_for_one_process(path: Path) -> None:
    dead = lock_file._this_process()._replace(started="1")  # its number belongs to another process now
    path.write_text(json.dumps(dead._asdict()))
    assert find_holder(path) is None
    start, results, locks = threading.Barrier(8), list[bool](), [LockFile(path) for _ in range(8)]

    def take(lock: LockFile) -> None:
        start.wait()
        try:
            lock.acquire()
        except LockHeldError:
            results.append(False)
        else:
            results.append(True)

    threads = [threading.Thread(target=take, args=(lock,)) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [False] * 7 + [True]
    for lock in locks:
        lock.release()
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("is_skewed", [False, True], ids=["clocks agree", "clocks differ"])
def test_a_process_on_another_machine_that_gives_signs_keeps_its_lock(
    path: Path, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch, is_skewed: bool
) -> None:
    if is_skewed:
        touch, old = os.utime, itertools.count(1)
        monkeypatch.setattr(lock_file.os, "utime", lambda path: touch(path, (0, next(old))))
    lock = elsewhere(path)
    with pytest.raises(LockHeldError, match="on node7"):
        LockFile(path).acquire()
    assert lock.taken_by is None
    lock.release()


def test_the_lock_of_a_machine_that_is_gone_is_taken_after_a_lease_and_not_given_back(
    path: Path, elsewhere: Elsewhere
) -> None:
    gone = elsewhere(path)
    die(gone)
    shown: list[str] = []
    since = time.monotonic()
    with stages.show_stages_on(shown.append), LockFile(path):
        assert time.monotonic() - since >= 0.25
        assert f"{path}: waiting up to 0.3 s to see if process {os.getpid()} on node7 (since" in shown[0]
        assert gone.taken_by is not None  # it was only paused, and has to stop now
        gone.release()
        assert find_holder(path) is not None
    assert gone.taken_by is not None


def test_a_process_that_is_taking_over_is_not_disturbed_and_one_that_has_ended_is(path: Path) -> None:
    """The file server's clock is an hour behind."""
    dead = lock_file._this_process()._replace(started="1")
    path.write_text(json.dumps(dead._asdict()))
    claim = path.with_name(f"{path.name}.{dead.token}")
    claim.touch()
    os.utime(claim, (time.time() - 3600,) * 2)
    since = time.monotonic()
    with LockFile(path):
        assert time.monotonic() - since >= 0.3
    assert list(path.parent.iterdir()) == []


def test_a_new_claim_in_place_of_an_old_one_has_its_own_lease(path: Path) -> None:
    """Another process was faster: this one has seen the old claim for a lease, the new one not at all."""
    dead = lock_file._this_process()._replace(started="1")
    path.write_text(json.dumps(dead._asdict()))
    claim = path.with_name(f"{path.name}.{dead.token}")
    claim.touch()
    lock = LockFile(path)
    assert not lock._take_over(dead)
    time.sleep(0.4)
    claim.write_text(json.dumps(lock_file._this_process()._asdict()))
    assert not lock._take_over(dead)
    assert claim.exists()


def test_a_lock_file_that_was_removed_by_hand_comes_back(path: Path) -> None:
    with LockFile(path) as lock:
        path.unlink()
        deadline = time.monotonic() + 10
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert find_holder(path) is not None
        assert lock.taken_by is None


def test_a_run_whose_machine_is_gone_is_resumed_after_a_lease(
    tmp_path: Path, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = experiment("a.yaml")
    journal = run(10, "a.yaml") / FILE_NAME
    (journal.parent / "experiment.yaml").write_text(Path("a.yaml").read_text())
    lock = elsewhere(journal.with_name(f"{FILE_NAME}.lock"))
    assert is_open(journal)
    with pytest.raises(ResourceError, match=r"still running in process \d+ on node7 \(since .*Wait for it, or stop it"):
        earlier(file, LATEST)
    die(lock)
    assert earlier(file, LATEST).status == "KILLED"


def test_a_driver_that_was_paused_while_its_run_was_resumed_writes_no_more(
    tmp_path: Path, elsewhere: Elsewhere
) -> None:
    first = Journal(tmp_path / FILE_NAME)
    first._lock.release()
    second = elsewhere(tmp_path / f"{FILE_NAME}.lock")
    time.sleep(0.2)
    with pytest.raises(OSError, match=r"process \d+ on node7 \(since .* has resumed this run") as caught:
        first.append(Warned(message="late"))
    assert caught.value.filename == str(tmp_path / FILE_NAME)
    first.close()
    second.release()
    with closing(Journal(tmp_path / FILE_NAME)), pytest.raises(UsageError, match="still running"):
        Journal(tmp_path / FILE_NAME)

"""Ranks that hang: what they say of themselves, and what the driver makes of it."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import toys

from pipeline.launch import inprocess
from pipeline.launch.base import Session
from pipeline.launch.hang import HangDetector
from pipeline.protocol.events import AnyEvent, Failed, Heartbeat, Origin, Phase, Warned, event_from_json, event_to_json
from pipeline.protocol.trial import Rank
from pipeline.train import watch
from pipeline.train.watch import Watchdog, mark, mark_step, waiting

PATIENCE_S = 30.0
TIMEOUT_S = 0.4


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "GRACE_S", 0.0)


def watching(outbox: toys.Kept, *, end: Callable[[], None] | None, timeout_s: float = TIMEOUT_S) -> Watchdog:
    return Watchdog("main", rank=Rank(rank=1), outbox=outbox, timeout_s=timeout_s, end=end)


def heartbeats(outbox: toys.Kept) -> list[Heartbeat]:
    return [event for event in outbox.events if isinstance(event, Heartbeat)]


def train_until(steps: int, phase: Phase) -> None:
    for step in range(steps):
        mark_step(step)
        mark(phase)


def the_users_own_code(ended: threading.Event, seconds: float = PATIENCE_S) -> bool:
    return ended.wait(seconds)


# A rank


def test_a_rank_that_stands_still_says_where_and_ends() -> None:
    outbox, ended = toys.Kept(), threading.Event()
    with watching(outbox, end=ended.set):
        assert [heartbeat.pid for heartbeat in heartbeats(outbox)] == [os.getpid()], "before anything can stop it"
        train_until(3, Phase.READING)
        assert the_users_own_code(ended)
    last = next(heartbeat for heartbeat in heartbeats(outbox) if heartbeat.is_stuck)
    assert (last.step, last.phase, last.rank.rank, last.pid) == (3, Phase.READING, 1, os.getpid())
    assert last.idle_s >= TIMEOUT_S
    assert "in the_users_own_code" in last.stack
    assert "timeout_s" in last.stall
    assert "reading data in step 3" in last.stall


@pytest.mark.parametrize(
    ("steps", "phase"), [(0, Phase.BUILDING), (1, Phase.FORWARD), (5, Phase.SAVING), (5, Phase.WAITING)]
)
def test_building_the_first_step_saving_and_waiting_take_as_long_as_they_like(steps: int, phase: Phase) -> None:
    outbox, ended = toys.Kept(), threading.Event()
    with watching(outbox, end=ended.set, timeout_s=0.2):
        train_until(steps, phase)
        deadline = time.monotonic() + PATIENCE_S  # a busy machine lets the watchdog run late
        while max(heartbeat.idle_s for heartbeat in heartbeats(outbox)) <= 0.2 and time.monotonic() < deadline:
            assert not ended.wait(0.1)
        assert not ended.wait(0.2)
    assert max(heartbeat.idle_s for heartbeat in heartbeats(outbox)) > 0.2
    assert not any(heartbeat.is_stuck for heartbeat in heartbeats(outbox))


def test_a_rank_that_waits_too_long_says_so_also_before_the_first_step_and_stays() -> None:
    outbox, ended = toys.Kept(), threading.Event()
    with watching(outbox, end=ended.set, timeout_s=0.2):
        with waiting():
            assert not ended.wait(0.6)
        last = heartbeats(outbox)[-1]
    assert (last.is_waiting, last.is_stuck, last.phase) == (True, True, Phase.WAITING)
    assert not heartbeats(outbox)[-1].is_waiting


def test_a_long_step_of_many_batches_is_no_hang() -> None:
    outbox, ended = toys.Kept(), threading.Event()
    with watching(outbox, end=ended.set, timeout_s=5.0):
        train_until(3, Phase.READING)
        for _ in range(30):
            time.sleep(0.05)
            mark(Phase.FORWARD)
    assert not ended.is_set()
    assert max(heartbeat.idle_s for heartbeat in heartbeats(outbox)) < 5.0
    assert outbox.events[-1].phase is Phase.ENDED


@pytest.mark.parametrize(
    ("phase", "said"), [(Phase.BUILDING, "building the experiment"), (Phase.FORWARD, "in the forward pass")]
)
def test_the_drivers_own_process_is_warned_once_and_left_alone(phase: Phase, said: str) -> None:
    outbox = toys.Kept()
    with Watchdog("main", rank=Rank(), outbox=outbox, timeout_s=0.2, end=None):
        train_until(1, phase)
        the_users_own_code(threading.Event(), 1.0)
    (warned,) = [event for event in outbox.events if isinstance(event, Warned)]
    *_, last = heartbeats(outbox)  # for the bar
    assert (last.step, last.phase, last.stack) == (1, phase, "")
    assert said in warned.message
    assert "in the_users_own_code" in warned.message


def test_a_training_that_failed_does_not_say_that_it_ended() -> None:
    outbox = toys.Kept()
    with pytest.raises(ZeroDivisionError), watching(outbox, end=threading.Event().set):
        raise ZeroDivisionError
    assert all(heartbeat.phase is not Phase.ENDED for heartbeat in heartbeats(outbox))


# The driver


def beat(
    rank: int, *, step: int = 7, phase: Phase = Phase.BACKWARD, node: str = "elsewhere", **more: object
) -> Heartbeat:
    where = Rank(rank=rank, world_size=3, node=node)
    known = {"pid": 1, "idle_s": 0.0, "stack": f"frames of rank {rank}\n"} | more
    return Heartbeat(time=0.0, rank=where, step=step, phase=phase, **known)


def failed(rank: int, origin: Origin = "peer_timeout") -> Failed:
    where = Rank(rank=rank, world_size=3, node="elsewhere")
    return Failed(time=0.0, rank=where, error="RuntimeError: Timed out waiting", traceback="", origin=origin)


def verdicts(*events: AnyEvent, timeout_s: float = 300.0, wait_s: float = 0.0) -> list[Failed]:
    """What is reported besides the ranks' own failures."""
    received: list[AnyEvent] = []
    detector = HangDetector(toys.trial(parallel={"timeout_s": timeout_s}), receive=received.append)
    with detector.watching():
        for event in events:
            detector.note(event)
        time.sleep(wait_s)
    return [event for event in received if isinstance(event, Failed)]


def test_heartbeats_of_rank_0_go_on_to_the_displays(tmp_path: Path) -> None:
    assert event_from_json(event_to_json(beat(0))) == beat(0)
    received: list[AnyEvent] = []
    session = Session(folder=tmp_path, receive=received.append, parallel=toys.trial().experiment.parallel)
    attempt = inprocess.Launcher(session).attempt(toys.trial())
    for event in (beat(0), beat(1), beat(0, step=8), beat(0, phase=Phase.ENDED)):
        attempt.receive_sent(event)
    assert received == [beat(0), beat(0, step=8)]


def test_a_rank_that_builds_for_long_is_named_once_with_its_code() -> None:
    received: list[AnyEvent] = []
    detector = HangDetector(toys.trial(parallel={"timeout_s": 30.0}), receive=received.append)
    for idle_s in (29.0, 30.0, 31.0):
        detector.note(beat(1, step=0, phase=Phase.BUILDING, idle_s=idle_s))
    (warned,) = received
    assert isinstance(warned, Warned)
    assert warned.message.startswith("rank 1: no progress for 30 s: building the experiment. Still waiting.")
    assert warned.message.endswith("\nframes of rank 1")


READING, WAITING = Phase.READING, Phase.WAITING


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([beat(0), beat(1, phase=READING, idle_s=5.0), beat(2), failed(0)], "for 5 s: reading data in step 7; "),
        ([beat(0, step=8, phase=READING), beat(1, step=7, phase=Phase.SAVING), failed(0)], "saving in step 7"),
        ([beat(1, phase=READING), beat(0, is_stuck=True, idle_s=300.0)], "reading data"),
        ([beat(1, phase=READING, is_stuck=True), beat(0, is_stuck=True)], "reading data"),
        (
            [beat(1, step=0, phase=WAITING), beat(0, step=0, phase=WAITING, is_waiting=True, is_stuck=True)],
            "between two exchanges",
        ),
    ],
    ids=["others wait for it", "a step behind", "one that is stuck waits for it", "both are stuck", "while building"],
)
def test_the_rank_behind_is_to_blame(events: list[AnyEvent], said: str) -> None:
    (verdict,) = verdicts(*events)
    assert (verdict.rank.rank, verdict.rank.node) == (1, "elsewhere")
    assert verdict.error.startswith("no progress for ")
    assert said in verdict.error
    assert verdict.traceback == "Stack of rank 1 (most recent call last):\nframes of rank 1\n"


@pytest.mark.parametrize(
    "events",
    [
        [beat(rank, phase=WAITING, is_waiting=True, is_stuck=True) for rank in range(2)],
        [*map(beat, range(3)), *map(failed, range(3))],
        [beat(0), beat(1, phase=READING), failed(2, "rank"), failed(0)],
    ],
    ids=["all wait", "a network that fails", "one failed by itself"],
)
def test_no_rank_is_blamed(events: list[AnyEvent]) -> None:
    assert verdicts(*events) == []


@pytest.mark.parametrize(("idle_s", "is_hang"), [(301.0, True), (5.0, False)])
def test_an_abort_by_nccl_is_a_hang_of_the_rank_behind_and_no_lost_worker(
    idle_s: float, is_hang: bool, tmp_path: Path
) -> None:
    trial = toys.trial()
    session = Session(folder=tmp_path, receive=lambda *_: None, parallel=trial.experiment.parallel)
    attempt = inprocess.Launcher(session).attempt(trial)
    with attempt.listening("127.0.0.1"):
        attempt.receive_sent(beat(1, step=1, phase=Phase.FORWARD))
        attempt.receive_sent(beat(0, step=1, phase=Phase.REPORTING, idle_s=idle_s))
    outcome = attempt.outcome({0: "killed by SIGABRT"})
    assert outcome.nodes == {0: "elsewhere", 1: "elsewhere"}
    assert outcome.has_only_lost_workers != is_hang
    message = "rank 1 on elsewhere: no progress" if is_hang else "rank 0 exited without reporting an error: killed by"
    assert str(outcome.error).startswith(message)


def test_a_rank_of_another_node_that_is_not_heard_any_more_is_lost_with_its_node() -> None:
    detector = HangDetector(toys.trial(parallel={"timeout_s": 0.5}), receive=pytest.fail)
    with detector.watching():
        for heartbeat in (beat(0, phase=Phase.ENDED), beat(1), beat(2, phase=Phase.WAITING, is_waiting=True)):
            detector.note(heartbeat)
        time.sleep(1.6)
    assert detector.lost == {
        1: "its node hangs or is unreachable, or a signal stopped its process while in the backward pass in step 7",
        2: "its node hangs or is unreachable, or a signal stopped its process while waiting for other ranks in step 7",
    }


def test_ranks_that_waited_in_vain_for_a_silent_one_of_another_node_have_lost_it() -> None:
    received: list[AnyEvent] = []
    detector = HangDetector(toys.trial(parallel={"timeout_s": 1.0}), receive=received.append)
    with detector.watching():
        detector.note(beat(1))
        time.sleep(0.8)  # some heartbeats of a tenth of a second each
        detector.note(beat(0))
        detector.note(failed(0))
    assert received == []
    assert list(detector.lost) == [1]


def test_a_process_that_is_gone_has_not_stopped() -> None:
    """How it went, the launcher knows."""
    detector = HangDetector(toys.trial(parallel={"timeout_s": 0.5}), receive=pytest.fail)
    with detector.watching():
        detector.note(beat(1, node=socket.gethostname(), pid=2**22 + 1))
        detector.forget(1)
        time.sleep(1.6)


def test_a_stopped_process_is_killed_with_its_children() -> None:
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '100']); print(p.pid, flush=True); p.wait()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        itself = psutil.Process(process.pid)
        itself.suspend()
        more = {"node": socket.gethostname(), "pid": process.pid}
        (verdict,) = verdicts(beat(1, **more), timeout_s=0.5, wait_s=1.6)
        assert (verdict.rank.rank, verdict.traceback.endswith("frames of rank 1\n")) == (1, True)
        assert "its process was stopped by a signal while in the backward pass in step 7" in verdict.error
        assert process.wait(PATIENCE_S) < 0
        psutil.wait_procs([child], timeout=PATIENCE_S)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE

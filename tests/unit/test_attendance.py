"""Which ranks have come and gone, as the driver sees it: in processes that it started, or that others did."""

# promise: variables of torchrun and srun; those that contradict are named; resources and versions of all ranks

import os
import signal
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import toys

from pipeline.errors import TrainingError
from pipeline.experiment.schema import Parallel
from pipeline.launch import node_facts, outer, torchrun
from pipeline.launch.base import Attempt, Session, StopRequest, gracefully
from pipeline.plan.outer_launcher import OuterLauncher
from pipeline.protocol.events import AnyEvent, Failed, Heartbeat, Origin, Phase
from pipeline.protocol.trial import Rank

SESSION = Session(folder=Path(), receive=lambda _: None, parallel=Parallel())
ENDED = threading.Thread()  # A training in this process that has ended


def heartbeat(rank: int, phase: Phase = Phase.BUILDING) -> Heartbeat:
    return Heartbeat(trial="main", rank=Rank(rank=rank, world_size=3), pid=1, step=0, phase=phase, idle_s=0.0)


def failed(rank: int, origin: Origin = "rank") -> Failed:
    return Failed(trial="main", rank=Rank(rank=rank, world_size=3), error="", traceback="", origin=origin)


def attempt(*events: AnyEvent) -> Attempt:
    made = Attempt(toys.trial().model_copy(update={"workers": 3}), session=SESSION, stop=StopRequest())
    for event in events:
        made.receive_sent(event)
    return made


def lost(*events: AnyEvent, starts_within_s: float = 1000, hung_up: int | None = None) -> dict[int, str]:
    """The ranks that are lost after these events, and how."""
    there = attempt(*events)
    if hung_up is not None:
        there.hung_up(hung_up)
    return outer.await_ends(there, ENDED, deadline=time.monotonic() + starts_within_s)


ALL_ENDED = [heartbeat(rank, Phase.ENDED) for rank in range(3)]


def test_a_rank_that_hangs_up_before_its_end_is_lost() -> None:
    died = "its process was killed or crashed, or its node is unreachable"
    assert lost(heartbeat(0), heartbeat(1), heartbeat(2), hung_up=2) == {2: died}


@pytest.mark.parametrize("last", [heartbeat(1, Phase.ENDED), failed(1, "lost_peer")], ids=["ended", "failed"])
def test_a_rank_that_has_said_its_end_is_not_lost(last: AnyEvent) -> None:
    there = attempt(heartbeat(1), last)
    there.hung_up(1)
    assert there.lost == set()
    assert lost(*ALL_ENDED, hung_up=1) == {}


def test_a_rank_that_does_not_come_in_time_is_late() -> None:
    late = "it did not start within parallel.start_timeout_s (600 s)"
    assert lost(heartbeat(0), heartbeat(2), starts_within_s=0) == {1: late}


def test_the_rank_that_the_others_have_failed_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer, "_LAST_REPORTS_S", 0.0)
    monkeypatch.setattr(outer, "_LOSS_S", 0.0)
    waits = (heartbeat(1), failed(0, "peer_timeout"), failed(2, "lost_peer"))
    assert lost(*waits).keys() == {1}
    assert lost(*waits, failed(1)) == {}, "its own failure is the reason"


def test_a_launcher_that_ends_all_because_a_rank_died_is_not_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun sends SIGTERM to the others within a tenth of a second."""
    where = OuterLauncher(
        name="torchrun", rank=0, world_size=3, local_rank=0, local_world_size=3, host="127.0.0.1", port=1
    )  # fmt: skip
    stop = StopRequest()
    there = Attempt(toys.trial().model_copy(update={"workers": 3}), session=SESSION, stop=stop)
    sent: list[outer.Command] = []
    group = SimpleNamespace(send=sent.append, connected=lambda _: None, outer=where, number=1, node="a")
    facts = [SimpleNamespace(rank=rank, gpus={}, resources=SimpleNamespace(node="a")) for rank in range(3)]
    monkeypatch.setattr(outer, "join", lambda *_, **__: group)
    monkeypatch.setattr(outer, "facts_of_all", lambda *_, **__: facts)
    monkeypatch.setattr(outer, "_enter", lambda *_, **__: Rank())

    def train(*_: object) -> None:
        there.hung_up(1)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(outer, "_train", train)
    for has_started in (True, False):
        with (
            pytest.raises(TrainingError, match="rank 1 exited without reporting an error") as error,
            gracefully(stop, grace_s=60, is_worth_it=lambda has_started=has_started: has_started),
        ):
            raise outer.launch(there, where, stop).error
        assert "SIGTERM" not in str(error.value)
    assert sent[0].channel.startswith("127.0.0.1:")


def test_interface_is_that_of_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    assert node_facts.address_facing("127.0.0.1") == "127.0.0.1"
    loopback = node_facts.interface_variables("127.0.0.1")
    assert loopback["NCCL_SOCKET_IFNAME"] == f"={loopback['GLOO_SOCKET_IFNAME']}"
    assert node_facts.interface_variables("192.0.2.1") == {}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert node_facts.interface_variables("127.0.0.1").keys() == {"NCCL_SOCKET_IFNAME"}


@pytest.mark.parametrize(
    ("names", "listens_at"),
    [
        (["10.0.0.7"], "10.0.0.7"),
        (["fd00::7"], "fd00::7"),  # a pod without IPv4
        (["fd00::7", "127.0.1.1", "10.0.0.7", "10.0.0.5"], "10.0.0.7"),
        (["127.0.1.1"], "0.0.0.0"),
    ],
)
def test_rank_0_listens_at_the_address_of_its_name(
    names: list[str], listens_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        families = [socket.AF_INET6 if ":" in name else socket.AF_INET for name in names]
        return [(family, 1, 6, "", (name, port)) for family, name in zip(families, names, strict=True)]

    monkeypatch.setattr(node_facts.socket, "getaddrinfo", resolve)
    there = OuterLauncher(name="srun", rank=0, world_size=2, local_rank=0, local_world_size=1, host="node7", port=29500)
    assert node_facts.find_own_address(there) == listens_at
    assert [node_facts.is_loopback(address) for address in ("127.0.1.1", "::1", "10.0.0.1")] == [True, True, False]


def test_a_rank_that_waits_for_its_gpu_is_killed_soon_after_another_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's handler of SIGTERM doesn't run while the main thread is in a C call."""
    now, signals = 0.0, list[tuple[int, float]]()
    codes: dict[int, int | None] = {1: 1, 2: None}

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    def kill(pid: int, number: int) -> None:
        signals.append((number, now))
        codes[pid] = codes[pid] or (-number if number == signal.SIGKILL else None)

    monkeypatch.setattr(torchrun, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    monkeypatch.setattr(os, "killpg", kill)
    ranks = iter(SimpleNamespace(pid=pid, stdin=None, poll=lambda pid=pid: codes[pid]) for pid in codes)
    monkeypatch.setattr(torchrun.Launcher, "_start_rank", lambda *_: next(ranks))
    trial = toys.trial().model_copy(update={"workers": 2})
    launcher = torchrun.Launcher(Session(folder=Path(), receive=pytest.fail, parallel=trial.experiment.parallel))
    assert launcher._run(trial, {}) == {0: "ended with exit code 1"}
    assert [number for number, _ in signals] == [signal.SIGTERM] * 2 + [signal.SIGKILL] * 2
    assert signals[-1][1] < 5


@pytest.mark.parametrize("codes", [[0, 0], [0, None], [0, 1]])
def test_a_rank_that_leaves_with_exit_code_0_before_its_end_has_failed(codes: list[int | None]) -> None:
    """os._exit(0) in user code; the other ranks only lose their peer."""
    ranks: Any = [SimpleNamespace(poll=lambda code=code: code) for code in codes]
    assert torchrun._await_ends(ranks, lost={0})[0].startswith("ended with exit code 0 before the end of the training.")
    assert torchrun._await_ends(ranks[:1], lost=set()) == {}

"""Which ranks have come and gone, and the workers that other processes of an outer launcher start."""

# promise: variables of torchrun and srun; those that contradict are named; resources and versions of all ranks

import os
import signal
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import toys

from pipeline.experiment.schema import Parallel
from pipeline.launch import _outer_group as outer_group
from pipeline.launch import _outer_workers, torchrun
from pipeline.launch._outer_workers import OtherWorker, OuterWorkers
from pipeline.launch._shutdown import StopRequest
from pipeline.launch.base import Attempt, Session
from pipeline.plan.outer_launcher import OuterLauncher
from pipeline.protocol.events import AnyEvent, Failed, Heartbeat, Origin, Phase
from pipeline.protocol.rank import Rank
from pipeline.worker import interfaces

SESSION = Session(folder=Path(), receive=lambda _: None, parallel=Parallel())


def heartbeat(rank: int, phase: Phase = Phase.BUILDING) -> Heartbeat:
    where = Rank(rank=rank, world_size=3)
    return Heartbeat(trial="main", rank=where, pid=1, process_started=0.0, step=0, phase=phase, idle_s=0.0)


def failed(rank: int, origin: Origin = "rank") -> Failed:
    return Failed(trial="main", rank=Rank(rank=rank, world_size=3), error="", traceback="", origin=origin)


def attempt(*events: AnyEvent) -> Attempt:
    made = Attempt(toys.trial(), session=SESSION, stop=StopRequest(), resize=StopRequest())
    for event in events:
        made.receive_sent(event)
    return made


def test_rank_that_hangs_up_before_its_end_is_lost() -> None:
    there = attempt(heartbeat(1), heartbeat(2))
    there.hung_up(2)
    assert there.lost == {2}
    assert there.await_ends([1, 2], timeout_s=1000) == {2}


@pytest.mark.parametrize("last", [heartbeat(1, Phase.ENDED), failed(1, "lost_peer")], ids=["ended", "failed"])
def test_rank_that_has_said_its_end_is_not_lost(last: AnyEvent) -> None:
    there = attempt(heartbeat(1), last)
    there.hung_up(1)
    assert there.lost == set()
    assert there.await_ends([1, 2], timeout_s=0) == {2}


def worker_of(rank: int, *events: AnyEvent, starts_within_s: float = 1000) -> OtherWorker:
    return OtherWorker(rank, attempt=attempt(*events), deadline=time.monotonic() + starts_within_s)


def test_worker_of_another_rank_has_an_exit_code_like_those_that_are_started_here() -> None:
    assert worker_of(1, heartbeat(1)).poll() is None
    assert worker_of(1, heartbeat(1), heartbeat(1, Phase.ENDED)).poll() == 0
    assert worker_of(1, heartbeat(1), failed(1, "lost_peer")).poll() == 1
    assert worker_of(1, heartbeat(2)).poll() is None
    assert worker_of(1, heartbeat(2), starts_within_s=0).poll() == 1


def outer_workers(*events: AnyEvent) -> OuterWorkers:
    workers = object.__new__(OuterWorkers)
    workers._attempt = attempt(*events)
    workers._trial, workers._timeout_s, workers._facts = toys.trial().model_copy(update={"workers": 3}), 7.0, ()
    return workers


def test_rank_that_another_one_has_failed_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_outer_workers, "_LAST_REPORTS_S", 0.0)
    waits = (heartbeat(1), failed(0, "peer_timeout"), failed(2, "lost_peer"))
    assert outer_workers(*waits).find_lost({0: "exit code 1"}).keys() == {1}
    assert outer_workers(*waits, failed(1)).find_lost({0: "exit code 1"}) == {}, "its own failure is the reason"
    assert outer_workers(*waits).find_lost({1: ""}) == {}, "it is known"


def test_lost_workers_of_other_ranks_have_come_or_were_late() -> None:
    there = outer_workers(heartbeat(1)).outcome({0: "killed by SIGKILL", 1: "", 2: ""})
    assert there.losses == {
        0: "killed by SIGKILL",
        1: "its process was killed or crashed, or its node is unreachable",
        2: "it did not start within parallel.start_timeout_s (7 s)",
    }


def test_interface_is_that_of_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    assert interfaces.address_facing("127.0.0.1") == "127.0.0.1"
    loopback = interfaces.interface_variables("127.0.0.1")
    assert loopback["NCCL_SOCKET_IFNAME"] == f"={loopback['GLOO_SOCKET_IFNAME']}"
    assert interfaces.interface_variables("192.0.2.1") == {}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert interfaces.interface_variables("127.0.0.1").keys() == {"NCCL_SOCKET_IFNAME"}


@pytest.mark.parametrize(
    ("names", "listens_at"),
    [
        (["10.0.0.7"], "10.0.0.7"),
        (["fd00::7"], "fd00::7"),  # a pod without IPv4
        (["fd00::7", "127.0.1.1", "10.0.0.7", "10.0.0.5"], "10.0.0.7"),
    ],
)
def test_rank_0_listens_at_the_address_of_its_name(
    names: list[str], listens_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        families = [socket.AF_INET6 if ":" in name else socket.AF_INET for name in names]
        return [(family, 1, 6, "", (name, port)) for family, name in zip(families, names, strict=True)]

    monkeypatch.setattr(outer_group.socket, "getaddrinfo", resolve)
    outer = OuterLauncher(name="srun", rank=0, world_size=2, local_rank=0, local_world_size=1, host="node7", port=29500)
    assert outer_group._own_address(outer) == listens_at


@pytest.mark.parametrize(("address", "is_so"), [("127.0.1.1", True), ("::1", True), ("10.0.0.1", False)])
def test_loopback(address: str, is_so: bool) -> None:
    assert interfaces.is_loopback(address) == is_so


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
    ranks = iter(SimpleNamespace(pid=pid, poll=lambda pid=pid: codes[pid]) for pid in codes)
    forks: Any = SimpleNamespace(start=lambda *_, **__: next(ranks), take_warning=lambda: "")
    trial = toys.trial().model_copy(update={"workers": 2})
    parallel = trial.experiment.parallel
    launcher = torchrun.Launcher(Session(folder=Path(), receive=pytest.fail, parallel=parallel, verbose=True))
    assert launcher._run(trial, [], forks) == {0: "ended with exit code 1"}
    assert [number for number, _ in signals] == [signal.SIGTERM] * 2 + [signal.SIGKILL] * 2
    assert signals[-1][1] < 5


@pytest.mark.parametrize("codes", [[0, 0], [0, None], [0, 1]])
def test_a_rank_that_leaves_with_exit_code_0_before_its_end_has_failed(codes: list[int | None]) -> None:
    """os._exit(0) in user code; the other ranks only lose their peer."""
    ranks: Any = [SimpleNamespace(poll=lambda code=code: code) for code in codes]
    assert torchrun._losses(ranks, lost={0})[0].startswith("ended with exit code 0 before the end of the training.")
    assert torchrun._losses(ranks[:1], lost=set()) == {}

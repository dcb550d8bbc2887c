"""Which ranks have come and gone, and the connections of those that outlive their failure."""

# promise: variables of torchrun, srun, mpirun; those that contradict are named; resources and versions of all ranks

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import toys

from pipeline.launchers import _outer_group as outer_group
from pipeline.launchers import torchrun
from pipeline.launchers._attendance import Attendance
from pipeline.launchers._shutdown import StopRequest
from pipeline.launchers.base import Session
from pipeline.planning.outer_launcher import OuterLauncher
from pipeline.protocol.events import AnyEvent, Failed, Heartbeat, Origin, Phase
from pipeline.protocol.trial import Rank
from pipeline.worker import interfaces


def heartbeat(rank: int, phase: Phase = Phase.BUILDING) -> Heartbeat:
    where = Rank(rank=rank, world_size=3)
    return Heartbeat(trial="main", rank=where, pid=1, process_started=0.0, step=0, phase=phase, idle_s=0.0)


def failed(rank: int, origin: Origin = "rank") -> Failed:
    return Failed(trial="main", rank=Rank(rank=rank, world_size=3), error="", traceback="", origin=origin)


def attendance(*events: AnyEvent) -> Attendance:
    noted, passed = Attendance(), list[AnyEvent]()
    note = noted.noting(passed.append)
    for event in events:
        note(event)
    assert passed == list(events)
    return noted


def test_rank_that_hangs_up_before_its_end_is_lost() -> None:
    there = attendance(heartbeat(1), heartbeat(2))
    assert there.await_arrival([1, 2], timeout_s=0) == set()
    assert there.trouble_at is None
    there.hung_up(2)
    assert there.lost == {2}
    assert there.trouble_at is not None


@pytest.mark.parametrize("last", [heartbeat(1, Phase.ENDED), failed(1, "lost_peer")], ids=["ended", "failed"])
def test_rank_that_has_said_its_end_is_not_lost(last: AnyEvent) -> None:
    there = attendance(heartbeat(1), last)
    there.hung_up(1)
    assert there.lost == set()
    assert there.trouble_at is None
    assert there.await_ends([1, 2], timeout_s=0) == {2}


def test_own_failure_of_a_rank_is_the_trouble() -> None:
    assert attendance(heartbeat(1), failed(1)).trouble_at is not None


def test_arrival_ends_with_a_loss() -> None:
    there = attendance(heartbeat(1))
    there.hung_up(1)
    assert there.await_arrival([1, 2], timeout_s=1000) == set()
    assert attendance().await_arrival([1], timeout_s=0) == {1}


def test_withdrawn_request_is_none() -> None:
    stop = StopRequest()
    stop.ask()
    stop.withdraw()
    assert not stop.asked


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_only_connections_of_what_failed_are_ended(listening: socket.socket) -> None:
    address = listening.getsockname()
    with socket.create_connection(address) as earlier, listening.accept()[0] as far_earlier:
        ends: list[socket.socket] = []
        with pytest.raises(ZeroDivisionError), interfaces.connections_ended_by_failure():
            _connect_and_fail(listening, ends)
        with ends[0], ends[1] as far:
            far.settimeout(10)
            assert far.recv(1) == b""
        earlier.sendall(b"x")
        assert far_earlier.recv(1) == b"x"


def _connect_and_fail(listening: socket.socket, ends: list[socket.socket]) -> None:
    ends += [socket.create_connection(listening.getsockname()), listening.accept()[0]]
    raise ZeroDivisionError


def test_connections_of_what_ended_well_stay(listening: socket.socket) -> None:
    with interfaces.connections_ended_by_failure():
        own = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    with own, far:
        own.sendall(b"x")
        assert far.recv(1) == b"x"


def test_interface_is_that_of_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    assert interfaces.address_facing("127.0.0.1") == "127.0.0.1"
    loopback = interfaces.interface_variables("127.0.0.1", wanted=None)
    assert loopback["NCCL_SOCKET_IFNAME"] == f"={loopback['GLOO_SOCKET_IFNAME']}"
    assert interfaces.interface_variables("192.0.2.1", wanted=None) == {}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert interfaces.interface_variables("127.0.0.1", wanted=None).keys() == {"NCCL_SOCKET_IFNAME"}
    assert interfaces.interface_variables("127.0.0.1", wanted="ib1")["GLOO_SOCKET_IFNAME"] == "ib1"


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

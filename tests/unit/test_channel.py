"""Events between processes: all of them, in order, from nobody else, and no worker without its driver."""

# promise: times of a run are the driver's, whatever the nodes' clocks

import errno
import hmac
import os
import resource
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from waiting import eventually

from pipeline.errors import ResourceError
from pipeline.protocol import channel
from pipeline.protocol.channel import Address, ChannelOutbox, DirectOutbox, Inbox
from pipeline.protocol.events import AnyEvent, Metrics, Point, Warned, event_from_json, event_to_json


class Driver:
    """An inbox and what it has received."""

    def __init__(self, *, host: str = "127.0.0.1") -> None:
        self.received: list[tuple[AnyEvent, bytes]] = []
        self.hung_up: list[int] = []
        self.is_stopping = False
        self.inbox = Inbox(
            host=host,
            receive=lambda event, line: self.received.append((event, line)),
            hung_up=self.hung_up.append,
            is_stopping=lambda: self.is_stopping,
        )

    @property
    def messages(self) -> list[str]:
        return [event.message for event, _ in self.received if isinstance(event, Warned)]


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = Driver()
    with driver.inbox:
        yield driver


@pytest.fixture
def worker(driver: Driver, tmp_path: Path) -> Callable[..., ChannelOutbox]:
    return lambda rank=0: ChannelOutbox(driver.inbox.address, rank=rank, folder=tmp_path)


Worker = Callable[..., ChannelOutbox]


def warned(message: object) -> Warned:
    return Warned(time=0.0, message=str(message))


def test_all_events_arrive_in_order_before_the_worker_has_hung_up(driver: Driver, worker: Worker) -> None:
    with worker(3) as outbox:
        for number in range(2000):
            outbox.event(warned(number))
    assert driver.messages == [str(number) for number in range(2000)]
    assert driver.hung_up == [3]
    # A process that goes on, such as Ray's, has hung up all the same.
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("outbox")]


def test_an_event_that_cannot_be_taken_costs_no_other(tmp_path: Path) -> None:
    taken: list[AnyEvent] = []

    def receive(event: AnyEvent, _: bytes) -> None:
        if isinstance(event, Warned) and event.message == "5":
            raise RuntimeError("a mistake")
        taken.append(event)

    with (
        Inbox(host="127.0.0.1", receive=receive) as inbox,
        ChannelOutbox(inbox.address, rank=0, folder=tmp_path) as out,
    ):
        for number in range(10):
            out.event(warned(number))
    assert [event.message for event in taken if isinstance(event, Warned)] == [
        *"01234",
        "an event of rank 0 was not recorded: RuntimeError: a mistake. log.txt has more.",
        *"6789",
    ]


def test_what_is_no_number_arrives_with_its_line_and_the_time_of_the_driver(driver: Driver, worker: Worker) -> None:
    sent = Metrics(time=7.0, step=1, epoch=1, points=(Point("a", 1, float("inf")), Point("b", 1, 1e-300)))
    with worker() as outbox:
        outbox.event(sent)
    ((event, line),) = driver.received
    assert event == sent.model_copy(update={"time": event.time})
    assert abs(time.time() - event.time) < 20
    assert event_from_json(line) == event


def test_many_workers_at_once(driver: Driver, worker: Worker) -> None:
    def work(rank: int) -> None:
        with worker(rank) as outbox:
            for number in range(100):
                outbox.event(warned(f"{rank} {number}"))

    workers = [threading.Thread(target=work, args=(rank,)) for rank in range(8)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    for rank in range(8):
        assert [m for m in driver.messages if m.startswith(f"{rank} ")] == [f"{rank} {n}" for n in range(100)]
    assert len(driver.messages) == 800
    assert sorted(driver.hung_up) == list(range(8))


@pytest.mark.skipif(not Path("/proc/net/if_inet6").is_file(), reason="this machine has no IPv6")
def test_pods_without_ipv4(tmp_path: Path) -> None:
    driver = Driver(host="::1")
    address = Address.parse(str(driver.inbox.address))
    assert address == driver.inbox.address
    with driver.inbox, ChannelOutbox(address, rank=0, folder=tmp_path) as outbox:
        outbox.event(warned("over IPv6"))
        outbox.close()
    assert driver.messages == ["over IPv6"]


def test_all_workers_are_asked_to_stop_and_those_that_come_later(driver: Driver, worker: Worker) -> None:
    with worker() as early:
        assert not early.stop_asked
        driver.is_stopping = True
        eventually(lambda: early.stop_asked)
        with worker(1) as late:
            eventually(lambda: late.stop_asked)


def test_the_limit_of_open_files_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        with Driver().inbox:
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, 2**16), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_leaving_the_block_waits_for_what_is_on_its_way(tmp_path: Path) -> None:
    slow: list[AnyEvent] = []
    go = threading.Event()

    def receive(event: AnyEvent, _: bytes) -> None:
        go.wait()
        slow.append(event)

    with Inbox(host="127.0.0.1", receive=receive) as inbox:
        outbox = ChannelOutbox(inbox.address, rank=0, folder=tmp_path)
        for number in range(50):
            outbox.event(warned(number))
        closing = threading.Thread(target=outbox.close)
        closing.start()
        go.set()
    closing.join()
    assert len(slow) == 50


def test_a_worker_that_is_cut_off_is_waited_for_only_so_long(
    driver: Driver, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "_SILENT_S", 0.2)
    outbox = worker()
    monkeypatch.setattr(outbox, "_driver_is_gone", lambda: None)
    begin = time.monotonic()
    driver.inbox.__exit__(None, None, None)
    assert time.monotonic() - begin < 5
    outbox.close()
    driver.inbox.__exit__ = lambda *_: None  # type: ignore[method-assign]


def test_strangers_do_not_disturb(driver: Driver, worker: Worker, tmp_path: Path) -> None:
    """Neither one with a wrong key, nor one that talks nonsense or too much, nor ones that connect and say nothing."""
    at = (driver.inbox.address.host, driver.inbox.address.port)
    silent = [socket.create_connection(at) for _ in range(50)]
    with socket.create_connection(at) as talking, socket.create_connection(at) as endless:
        talking.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with talking.makefile("rb") as said:
            assert len(said.readlines()) == 1, "it is hung up on"
        with suppress(OSError):
            endless.sendall(bytes(2**20))
        wrong = Address(host=at[0], port=at[1], key=secrets.token_hex(32))
        with pytest.raises(ConnectionError, match="is not the driver of this run"):
            ChannelOutbox(wrong, rank=0, folder=tmp_path)
        with worker() as outbox:
            outbox.event(warned("known"))
    for each in silent:
        each.close()
    assert driver.messages == ["known"]
    assert driver.hung_up == [0]


def test_one_that_stays_silent_or_goes_on_as_if_it_had_been_let_in_is_hung_up_on(
    driver: Driver, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "_PROOF_S", 0.1)
    address = (driver.inbox.address.host, driver.inbox.address.port)
    for words in (b"", b"let me in\n" + event_to_json(warned("from a stranger")) + b"\n"):
        with socket.create_connection(address, timeout=30) as stranger, stranger.makefile("rb") as said:
            stranger.sendall(words)
            assert len(said.readlines()) == 1
    with worker() as outbox:
        outbox.event(warned("known"))
    assert driver.messages == ["known"]


def test_who_answers_without_the_key_gets_no_event(tmp_path: Path) -> None:
    """Something else listens where the driver was."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"00\n00\n")
                connection.recv(2**10)

        threading.Thread(target=answer, daemon=True).start()
        address = Address(host="127.0.0.1", port=server.getsockname()[1], key="secret")
        with pytest.raises(ConnectionError):
            ChannelOutbox(address, rank=0, folder=tmp_path)


def test_a_worker_that_sends_nonsense_and_one_with_its_proof_are_hung_up_on(driver: Driver, worker: Worker) -> None:
    address = driver.inbox.address
    with socket.create_connection((address.host, address.port)) as plain, plain.makefile("rb") as said:
        nonce = said.readline().strip()
        proof = hmac.new(address.key.encode(), nonce, "sha256").hexdigest()
        plain.sendall(f"{proof} 00 1\nno event\n".encode())
        assert len(said.readlines()) == 1, "the driver's own proof"
    with socket.create_connection((address.host, address.port)) as other, other.makefile("rb") as said:
        other.sendall(f"{proof} 00 1\nno event\n".encode())
        assert len(said.readlines()) == 1, "a new nonce, and no proof"
    assert driver.hung_up == [1]


def test_a_driver_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    timeouts: list[float] = []

    def dropped(address: tuple[str, int], *, timeout: float) -> socket.socket:
        timeouts.append(timeout)
        raise TimeoutError("timed out")

    monkeypatch.setattr(channel.socket, "create_connection", dropped)
    monkeypatch.setattr(channel.socket, "gethostname", lambda: "node7")
    message = r"node7 can't connect to the driver at 10\.0\.0\.1:29500: timed out\. A firewall .* Open all TCP ports"
    with pytest.raises(ResourceError, match=message):
        ChannelOutbox(Address(host="10.0.0.1", port=29500, key="k"), rank=0, folder=tmp_path)
    assert timeouts == [channel.CONNECT_S]


# Files, which every outbox writes into the run's folder


def test_a_file_replaces_an_older_one(tmp_path: Path) -> None:
    source, outbox = tmp_path / "source", DirectOutbox(tmp_path / "run", pytest.fail)
    for content in (b"a long first version", b"second"):
        source.write_bytes(content)
        outbox.file(source, "model/weights.pt")
        source.unlink()  # it has been kept
        assert (tmp_path / "run" / "model" / "weights.pt").read_bytes() == content
    assert not list(tmp_path.rglob("*.partial"))


def test_a_file_without_room_is_a_warning_and_the_older_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    events: list[AnyEvent] = []
    outbox = DirectOutbox(tmp_path, events.append)
    (tmp_path / "source").write_text("new")
    (tmp_path / "model.pt").write_text("old")
    monkeypatch.setattr(channel.shutil, "copyfileobj", full)
    outbox.file(tmp_path / "source", "model.pt")
    assert [event.message for event in events if isinstance(event, Warned)] == [
        "model.pt can't be kept: No space left on device"
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["source"]

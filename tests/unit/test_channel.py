"""Events and files between processes: all of them, in order, from nobody else, and no worker without its driver."""

# promise: times of a run are the driver's, whatever the nodes' clocks; logs arrive at any size

import errno
import os
import resource
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.errors import ResourceError
from pipeline.protocol.channel import inbox as inboxes
from pipeline.protocol.channel import ports as channel_ports
from pipeline.protocol.channel.inbox import Inbox, inside
from pipeline.protocol.channel.outbox import ChannelOutbox
from pipeline.protocol.channel.wire import EVENT, Address
from pipeline.protocol.channel.worker_clock import WorkerClock
from pipeline.protocol.events import AnyEvent, Heartbeat, Metrics, Phase, Point, Warned, event_to_json
from pipeline.protocol.rank import Rank


class Driver:
    """An inbox and what it has received."""

    def __init__(self, folder: Path, *, host: str = "127.0.0.1") -> None:
        self.events: list[AnyEvent] = []
        self.folder = folder
        self.inbox = Inbox(host=host, receive=self.events.append, folder=folder)

    @property
    def messages(self) -> list[str]:
        return [event.message for event in self.events if isinstance(event, Warned)]


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    driver = Driver(tmp_path)
    with driver.inbox:
        yield driver


def warned(message: object) -> Warned:
    return Warned(time=0.0, message=str(message))


def test_all_events_arrive_in_order_before_the_worker_has_hung_up(driver: Driver) -> None:
    sent = [warned(number) for number in range(2000)]
    with ChannelOutbox(driver.inbox.address) as outbox:
        for event in sent:
            outbox.event(event)
    assert driver.events == sent
    # A process that goes on, such as Ray's, has hung up all the same.
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("outbox")]


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="no MD5 in multiprocessing's handshake")
def test_python_that_may_not_use_md5_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def forbidden(*_: object) -> None:
        raise ValueError("[digital envelope routines] unsupported")

    # Not in all modules: the reader of the test before may still authenticate its last connection.
    monkeypatch.setattr(inboxes, "hmac", SimpleNamespace(new=forbidden))
    with pytest.raises(ResourceError, match=r"FIPS mode.*Use Python 3.12 or newer"):
        Driver(tmp_path)


def test_what_is_no_number_arrives(driver: Driver) -> None:
    with ChannelOutbox(driver.inbox.address) as outbox:
        outbox.event(Metrics(time=0.0, step=1, epoch=1, points=(Point("a", 1, float("inf")), Point("b", 1, 1e-300))))
    (event,) = driver.events
    assert isinstance(event, Metrics)
    assert event.points == (Point("a", 1, float("inf")), Point("b", 1, 1e-300))


@pytest.mark.parametrize("size", [0, 1, 2**22 - 1, 2**22, 2**22 + 1, 2 * 2**22 + 7])
def test_files_of_any_size_arrive_between_events(driver: Driver, tmp_path: Path, size: int) -> None:
    content = secrets.token_bytes(size)
    source = tmp_path / "source"
    source.write_bytes(content)
    with ChannelOutbox(driver.inbox.address) as outbox:
        outbox.event(warned("before"))
        outbox.file(source, "model/weights.pt")
        source.unlink()  # it has been sent
        outbox.event(warned("after"))

    assert (driver.folder / "model" / "weights.pt").read_bytes() == content
    assert driver.messages == ["before", "after"]
    assert not list(driver.folder.rglob("*.partial"))


def test_a_file_replaces_an_older_one(driver: Driver, tmp_path: Path) -> None:
    source = tmp_path / "source"
    with ChannelOutbox(driver.inbox.address) as outbox:
        for content in ("a long first version", "second"):
            source.write_text(content)
            outbox.file(source, "report.txt")
    assert (driver.folder / "report.txt").read_text() == "second"


def test_a_log_arrives_while_it_grows_and_is_continued_by_the_next_rank(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any size, each byte once, also half a character: the rank may be killed at any time."""
    log, appended = tmp_path / "log", list[int]()
    append = driver.inbox._append
    monkeypatch.setattr(
        driver.inbox, "_append", lambda part, name: appended.append(len(part)) or append(part, name=name)
    )
    written = "line\n" * 300_000 + "é"
    start, end = written.encode()[:-1], written.encode()[-1:]
    with log.open("wb", buffering=0) as writing, log.open("rb") as reading:
        outbox = ChannelOutbox(driver.inbox.address)
        for added in (start, end, b""):
            writing.write(added)
            outbox.append(reading, "logs/main/rank1-stderr.log")
    outbox.event(warned("sent"))
    outbox.close()
    arrived = driver.folder / "logs" / "main" / "rank1-stderr.log"
    assert arrived.read_text() == written
    assert sum(appended) == len(start) + len(end)
    assert max(appended) <= 2**18

    log.write_text("started again\n")
    with log.open("rb") as reading, ChannelOutbox(driver.inbox.address) as outbox:
        outbox.append(reading, "logs/main/rank1-stderr.log")
    assert arrived.read_text() == written + "started again\n"


def test_a_log_that_can_not_be_kept_is_one_warning(driver: Driver, tmp_path: Path) -> None:
    (driver.folder / "logs").write_text("not a folder")
    log = tmp_path / "log"
    log.write_bytes(bytes(2**19))
    with log.open("rb") as reading, ChannelOutbox(driver.inbox.address) as outbox:
        outbox.append(reading, "logs/rank1-stdout.log")
        outbox.event(warned("still there"))
    (first, last) = driver.messages
    assert first.startswith("logs/rank1-stdout.log can't be kept: ")
    assert last == "still there"


def test_a_file_that_is_not_there_is_the_senders_error(driver: Driver, tmp_path: Path) -> None:
    with ChannelOutbox(driver.inbox.address) as outbox:
        with pytest.raises(FileNotFoundError):
            outbox.file(tmp_path / "missing", "model.pt")
        outbox.event(warned("still there"))
    assert driver.messages == ["still there"]


def test_many_workers_at_once(driver: Driver) -> None:
    def work(rank: int) -> None:
        with ChannelOutbox(driver.inbox.address) as outbox:
            for number in range(100):
                outbox.event(warned(f"{rank} {number}"))

    workers = [threading.Thread(target=work, args=(rank,)) for rank in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for rank in range(8):
        assert [m for m in driver.messages if m.startswith(f"{rank} ")] == [f"{rank} {n}" for n in range(100)]
    assert len(driver.messages) == 800


@pytest.mark.skipif(not Path("/proc/net/if_inet6").is_file(), reason="this machine has no IPv6")
def test_pods_without_ipv4(tmp_path: Path) -> None:
    driver = Driver(tmp_path, host="::1")
    with driver.inbox, ChannelOutbox(driver.inbox.address) as outbox:
        outbox.event(warned("over IPv6"))
        outbox.close()
    assert driver.messages == ["over IPv6"]


def heartbeat(time: float) -> Heartbeat:
    return Heartbeat(
        time=time, rank=Rank(node="node7"), pid=1, process_started=0.0, step=1, phase=Phase.FORWARD, idle_s=0.0
    )


@pytest.mark.parametrize(("ahead_s", "said"), [(-20.0, "20.0 s behind"), (20.0, "20.0 s ahead of"), (0.3, "")])
def test_events_get_times_of_the_drivers_clock_and_a_difference_is_reported_once(
    driver: Driver, ahead_s: float, said: str
) -> None:
    with ChannelOutbox(driver.inbox.address) as outbox:
        for _ in range(8):
            outbox.event(heartbeat(time.time() + ahead_s))
        happened = time.time() - 30.0  # it has waited in the worker
        outbox.event(Warned(time=happened + ahead_s, message="late"))
    (late,) = [event for event in driver.events if isinstance(event, Warned) and event.message == "late"]
    assert late.time == pytest.approx(happened + (0.0 if said else ahead_s), abs=0.9)
    messages = [message for message in driver.messages if message != "late"]
    assert len(messages) == bool(said)
    assert all(message.startswith(f"The clock of node7 is {said} the clock of the driver") for message in messages)


def test_delays_are_no_difference_of_clocks_and_clocks_may_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's clock is 20 s ahead at first."""
    now, set_by, clock = 0.0, 0.0, WorkerClock()
    monkeypatch.setattr(time, "time", lambda: now + set_by)
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def corrected(at: float) -> float:
        assert clock.compare(heartbeat(at)) is None
        return clock.correct(heartbeat(at)).time

    assert [corrected(20.0 + (now := second)) for second in (1.0, 2.0)] == [1.0, 2.0]
    now = 60.0  # the network was cut: what was sent in between arrives at once
    assert corrected(25.0) == 5.0
    now = 70.0
    assert clock.correct(Warned(time=85.0, message="")).time == 65.0
    clock = WorkerClock()
    assert [corrected(20.0 + (now := second)) for second in (1.0, 2.0)] == [1.0, 2.0]
    now = 3.0
    assert corrected(3.0) == 3.0  # set by NTP
    clock = WorkerClock()
    assert [corrected(20.0 + (now := second)) for second in (1.0, 2.0)] == [1.0, 2.0]
    now, set_by = 3.0, 20.0  # the driver's clock, by NTP
    assert corrected(23.0) == 23.0


def test_a_driver_that_is_paused_at_the_start_finds_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    now, clock = 10.0, WorkerClock()
    monkeypatch.setattr(time, "time", lambda: now)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for second in (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0):  # they arrive together
        assert clock.compare(heartbeat(second)) is None
    for now in (10.1, 10.6, 11.1, 11.6, 12.1, 12.6):
        assert clock.compare(heartbeat(now)) is None


def test_at_the_limit_of_open_files_workers_wait_and_one_line_says_so(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inboxes, "_FULL_S", 0.01)
    accept, failures = driver.inbox._listener.accept, iter([errno.EMFILE] * 3)

    def accept_later() -> "Connection[bytes, bytes]":
        if error := next(failures, 0):
            raise OSError(error, os.strerror(error))
        return accept()

    monkeypatch.setattr(driver.inbox._listener, "accept", accept_later)
    for number in range(2):  # the first one is accepted by the call that is under way
        with ChannelOutbox(driver.inbox.address) as outbox:
            outbox.event(warned(number))
    (line,) = set(driver.messages) - {"0", "1"}
    assert line.startswith("The driver can't accept more workers: Too many open files (its limit is ")
    assert len(driver.messages) == 3


def test_the_limit_of_open_files_is_raised(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        with Driver(tmp_path).inbox:
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, 2**16), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_leaving_the_block_waits_for_what_is_on_its_way(tmp_path: Path) -> None:
    slow: list[AnyEvent] = []
    go = threading.Event()

    def receive(event: AnyEvent) -> None:
        go.wait()
        slow.append(event)

    with Inbox(host="127.0.0.1", receive=receive, folder=tmp_path) as inbox:
        outbox = ChannelOutbox(inbox.address)
        for number in range(50):
            outbox.event(warned(number))
        closing = threading.Thread(target=outbox.close)
        closing.start()
        go.set()
    closing.join()
    assert len(slow) == 50


def test_strangers_do_not_disturb(driver: Driver) -> None:
    """Neither one with a wrong key, nor one that talks nonsense, nor one that connects and says nothing."""
    at = (driver.inbox.address.host, driver.inbox.address.port)
    with socket.create_connection(at), socket.create_connection(at) as talking:
        talking.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(AuthenticationError):
            Client(at, authkey=b"wrong")
        with pytest.raises(AuthenticationError):
            ChannelOutbox(Address(host=at[0], port=at[1], key=secrets.token_hex(32)))
        with ChannelOutbox(driver.inbox.address) as outbox:
            outbox.event(warned("known"))
    assert driver.messages == ["known"]


def test_what_a_stranger_says_all_the_same_is_not_heard(driver: Driver) -> None:
    """It answers the question for the key with nonsense, and goes on as if it had been let in."""
    plain = socket.create_connection((driver.inbox.address.host, driver.inbox.address.port))
    with Connection(plain.detach()) as stranger:
        stranger.recv_bytes()
        stranger.send_bytes(b"let me in")
        assert stranger.recv_bytes() == b"#FAILURE#"
        with suppress(OSError, EOFError):  # it has been hung up on
            stranger.send_bytes(EVENT + event_to_json(warned("from a stranger")))
            stranger.recv_bytes()
    with ChannelOutbox(driver.inbox.address) as outbox:
        outbox.event(warned("known"))
    assert driver.messages == ["known"]


def test_a_driver_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts: list[float] = []

    def dropped(address: tuple[str, int], *, timeout: float) -> socket.socket:
        timeouts.append(timeout)
        raise TimeoutError("timed out")

    monkeypatch.setattr(channel_ports.socket, "create_connection", dropped)
    monkeypatch.setattr(channel_ports.socket, "gethostname", lambda: "node7")
    message = r"node7 can't connect to the driver at 10\.0\.0\.1:29500: timed out\. A firewall .* Open all TCP ports"
    with pytest.raises(ResourceError, match=message):
        ChannelOutbox(Address(host="10.0.0.1", port=29500, key="k"))
    assert timeouts == [channel_ports.CONNECT_TIMEOUT_S]


def test_each_inbox_has_a_key_of_its_own(tmp_path: Path) -> None:
    with Driver(tmp_path).inbox as one, Driver(tmp_path).inbox as other:
        assert one.address.key != other.address.key
        assert len(one.address.key) >= 32


@pytest.mark.parametrize("name", ["../outside", "/outside", "model/../../outside"])
def test_a_name_that_leads_outside_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with pytest.raises(ValueError, match="is not inside"):
        inside(folder, name)
    assert inside(folder, "model/weights.pt") == folder / "model" / "weights.pt"


def test_a_link_does_not_lead_outside(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="is not inside"):
        inside(folder, "link/outside")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the reader's, which is the point
def test_a_worker_that_sends_a_file_outside_is_hung_up_on(driver: Driver, tmp_path: Path) -> None:
    at, key = (driver.inbox.address.host, driver.inbox.address.port), driver.inbox.address.key
    with Client(at, authkey=key.encode()) as connection:
        connection.send_bytes(b"f../outside")
        with pytest.raises((EOFError, ConnectionError)):
            connection.recv_bytes()
    assert not (driver.folder.parent / "outside").exists()
    assert not list(driver.folder.parent.glob("*.partial"))


def test_a_worker_that_dies_in_a_file_leaves_no_half_file(driver: Driver) -> None:
    at, key = (driver.inbox.address.host, driver.inbox.address.port), driver.inbox.address.key
    with Client(at, authkey=key.encode()) as connection:
        connection.send_bytes(b"fmodel.pt")
        connection.send_bytes(b"chalf")
    with ChannelOutbox(driver.inbox.address) as outbox:
        outbox.event(warned("another"))
    driver.inbox.__exit__(None, None, None)
    assert not (driver.folder / "model.pt").exists()
    assert driver.messages == ["another"]

"""Workers that see each other over a link of a given bandwidth and delay, on one Linux machine; needs root.

Each worker has a network namespace of its own. `tc`'s token bucket (tbf) limits what a worker sends; a delay line, a
small process that carries packets from one namespace to the other, holds each packet for the one-way delay. (netem
would do both, but many kernels of virtual machines are built without it.) The delay line runs in a namespace of its own
with real-time priority, so the root namespace stays as it is. What a link is in the end, `measured_link` tells.
"""

import fcntl
import json
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from statistics import median
from types import TracebackType
from typing import Self

import psutil

from pipeline.errors import ResourceError
from pipeline.protocol.trial_result import Link

_PACKETS_A_SECOND = 4_000  # more would cost the delay line cores that the workers need
_SMALLEST_PACKET, _LARGEST_PACKET = 9_000, 30_000
_TUN_SET_INTERFACE, _TUN_PLAIN = 0x400454CA, 0x0001 | 0x1000  # TUNSETIFF; IFF_TUN without packet information
_QUEUE_BYTES = 4_000_000
_PING_BYTES, _PINGS, _PORT = 64, 50, 5201


def check() -> None:
    """Refuse to start what can't work.

    Raises:
        ResourceError: not root, or no ip or tc.
    """
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        raise ResourceError(f"{' and '.join(missing)} not found; install iproute2")
    if os.geteuid() != 0:
        raise ResourceError("network namespaces need root; run it with sudo")


class Network:
    """Namespaces joined by one link, there while the context is open."""

    def __init__(self, workers: int, *, link: Link) -> None:
        """``link.latency_us`` is the delay of a packet one way."""
        self._workers = workers
        self._link = link
        self._prefix = f"bench{os.getpid()}"
        self._line: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        for name in [self._hub, *map(self.namespace, range(self._workers))]:
            _ip("netns", "add", name)
        delay_s = self._link.latency_us / 1e6
        arguments = [sys.executable, __file__, "delay", str(self._workers), str(delay_s)]
        self._line = subprocess.Popen(["ip", "netns", "exec", self._hub, *arguments], stdout=subprocess.PIPE, text=True)
        assert self._line.stdout is not None
        if self._line.stdout.readline().strip() != "ready":
            raise ResourceError("the delay line did not start; is there /dev/net/tun?")
        for worker in range(self._workers):
            self._connect(worker)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._line is not None:
            self._line.terminate()
            self._line.communicate()
        for name in [self._hub, *map(self.namespace, range(self._workers))]:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)

    def namespace(self, worker: int) -> str:
        """Name of a worker's namespace."""
        return f"{self._prefix}w{worker}"

    def inside(self, worker: int, command: Sequence[str]) -> list[str]:
        """The command line that runs a command where that worker is."""
        return ["ip", "netns", "exec", self.namespace(worker), *command]

    @property
    def busy_s(self) -> float:
        """Seconds that the delay line has computed."""
        times = psutil.Process(self._line.pid).cpu_times() if self._line else None
        return float(times.user + times.system) if times else 0.0

    @property
    def _hub(self) -> str:
        return f"{self._prefix}hub"

    def _connect(self, worker: int) -> None:
        name = self.namespace(worker)
        _ip("-n", self._hub, "link", "set", f"line{worker}", "netns", name)
        rate = self._link.bandwidth_gbit * 1e9
        mtu = str(max(_SMALLEST_PACKET, min(_LARGEST_PACKET, round(rate / 8 / _PACKETS_A_SECOND))))
        _ip("-n", name, "link", "set", f"line{worker}", "name", "eth0", "mtu", mtu, "txqueuelen", "10000")
        _ip("-n", name, "addr", "add", f"{address(worker)}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "link", "set", "eth0", "up")
        shape = ["root", "tbf", "rate", f"{rate:.0f}bit", "burst", str(2 * int(mtu)), "limit", str(_QUEUE_BYTES)]
        subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", "eth0", *shape], check=True)


def address(worker: int) -> str:
    """IP address of a worker; the same in every network, since networks don't see each other."""
    return f"10.99.0.{worker + 1}"


def measured_link(network: Network, *, megabytes: int = 8) -> Link:
    """The link from worker 0 to worker 1 as TCP sees it: half of a round trip, and the rate of a bulk transfer."""
    command = [sys.executable, __file__]
    server = subprocess.Popen(network.inside(1, [*command, "serve"]), stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    server.stdout.readline()
    asked = network.inside(0, [*command, "ask", address(1), str(megabytes)])
    answer = subprocess.run(asked, check=True, capture_output=True, text=True, timeout=30).stdout
    server.communicate(timeout=10)
    return Link.model_validate(json.loads(answer))


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


# What runs inside the namespaces


def delay_line(workers: int, delay_s: float) -> None:
    """Carry packets between as many network devices, each ``delay_s`` late."""
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))  # on time, also when workers use all cores
    ends = [_device(f"line{worker}") for worker in range(workers)]
    print("ready", flush=True)
    waiting: deque[tuple[float, bytes]] = deque()
    while True:
        patience = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for end in select.select(ends, [], [], patience)[0]:
            waiting.extend((time.monotonic() + delay_s, packet) for packet in _packets(end))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            packet = waiting.popleft()[1]
            to = packet[19] - 1 if packet[0] >> 4 == 4 else workers  # last byte of the destination's IPv4 address
            if to < workers:
                os.write(ends[to], packet)


def _device(name: str) -> int:
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _TUN_SET_INTERFACE, struct.pack("16sH22x", name.encode(), _TUN_PLAIN))
    return end


def _packets(end: int) -> list[bytes]:
    packets = []
    try:
        while len(packets) < 64:  # the others want to be read, too
            packets.append(os.read(end, 2 * _LARGEST_PACKET))
    except BlockingIOError:
        pass
    return packets


def _serve() -> None:
    with socket.create_server(("", _PORT)) as server:
        print("ready", flush=True)
        peer = server.accept()[0]
        with peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while size := struct.unpack("!Q", _received(peer, 8) or bytes(8))[0]:
                _received(peer, size)
                peer.sendall(b"!")


def _ask(host: str, megabytes: int) -> Link:
    with socket.create_connection((host, _PORT)) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pings = [_exchange(peer, _PING_BYTES) for _ in range(_PINGS)]
        size = megabytes * 10**6
        _exchange(peer, size)  # TCP finds its window
        seconds = median(_exchange(peer, size) for _ in range(3)) - median(pings)
        return Link(latency_us=1e6 * median(pings) / 2, bandwidth_gbit=8 * size / seconds / 1e9)


def _exchange(peer: socket.socket, size: int) -> float:
    start = time.perf_counter()
    peer.sendall(struct.pack("!Q", size) + bytes(size))
    _received(peer, 1)
    return time.perf_counter() - start


def _received(peer: socket.socket, size: int) -> bytes:
    """That many bytes, of which the last part is returned; nothing at the end of the stream."""
    data = b""
    while size and (data := peer.recv(min(size, 1 << 20))):
        size -= len(data)
    return data


if __name__ == "__main__":
    if sys.argv[1] == "delay":
        delay_line(int(sys.argv[2]), float(sys.argv[3]))
    elif sys.argv[1] == "serve":
        _serve()
    else:
        print(_ask(sys.argv[2], int(sys.argv[3])).model_dump_json())

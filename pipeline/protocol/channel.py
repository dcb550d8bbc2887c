"""Events from workers to the driver: a line of JSON each, over one authenticated TCP connection for each worker.

Both sides prove by an HMAC of the other's nonce that they have the key. The driver says one thing later: stop.
"""

import hmac
import logging
import os
import queue
import secrets
import selectors
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import ValidationError

from pipeline.errors import ResourceError
from pipeline.experiment.values import Frozen
from pipeline.protocol.events import AnyEvent, Warned, event_from_json, event_to_json
from pipeline.system import raise_limit_of_open_files

Receive = Callable[[AnyEvent], None]
CONNECT_S = 20.0  # Seconds to connect; the kernel itself would try for about 130 s
_PROOF_S, _POLL_S = 10.0, 0.1
_SILENT_S, _INTERRUPTED_S = 5.0, 2.0
_LONGEST_PROOF, _LONGEST_LINE = 2**9, 2**28
_log = logging.getLogger(__name__)


class Address(Frozen):
    """Address of the driver's inbox, as a text ``host:port:key``. The key is a secret."""

    host: str
    port: int
    key: str

    def __str__(self) -> str:
        return f"{self.host}:{self.port}:{self.key}"

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Read the address from its text."""
        host, port, key = text.rsplit(":", 2)
        return cls(host=host, port=int(port), key=key)


class Inbox:
    """Driver's side of the channel; inside its context a thread receives all events, and who has ``hung_up``."""

    def __init__(
        self,
        *,
        host: str,
        receive: Callable[[AnyEvent, bytes], None],
        hung_up: Callable[[int], None] = lambda _: None,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        raise_limit_of_open_files()
        self._receive, self._hung_up, self._is_stopping = receive, hung_up, is_stopping
        self._server = open_server(host)
        self.address = Address(host=host, port=self._server.getsockname()[1], key=secrets.token_hex(32))
        self._peers: dict[socket.socket, _Peer] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._is_closing = False
        self._heard = 0.0  # from anyone, in seconds of the monotonic clock
        self._thread = threading.Thread(target=self._run, name="inbox", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Wait for what is on its way. A node that was cut off never hangs up; after an error workers may go on."""
        since = time.monotonic()
        patience_s = _INTERRUPTED_S if kind is not None and issubclass(kind, KeyboardInterrupt) else _SILENT_S
        while self._peers and time.monotonic() - (since if kind else max(since, self._heard)) < patience_s:
            time.sleep(_POLL_S / 5)
        self._is_closing = True
        self._thread.join()
        for each in (*self._peers, self._server):
            each.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._is_closing:
            for key, _ in self._selector.select(_POLL_S):
                try:
                    if key.fileobj is self._server:
                        self._accept()
                    else:
                        self._read(self._peers[key.fileobj])  # type: ignore[index]
                except Exception:  # noqa: BLE001 - a mistake of ours must not silence all workers: one counts as lost
                    _log.exception("a line of a worker could not be taken, so its connection is closed")
                    if (peer := self._peers.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                        self._drop(peer)
            for peer in tuple(self._peers.values()):
                if peer.rank is None and time.monotonic() > peer.deadline:
                    self._drop(peer)
                elif peer.rank is not None and not peer.is_stopping and self._is_stopping():
                    peer.is_stopping = True
                    peer.tell(b"stop")

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError as error:  # it died while it connected, or no file can be opened: it is tried again
            _log.warning("no worker can connect: %s", error)
            time.sleep(_POLL_S)
            return
        connection.setblocking(False)
        self._peers[connection] = peer = _Peer(connection)
        self._selector.register(connection, selectors.EVENT_READ)
        peer.tell(peer.nonce.encode())

    def _read(self, peer: "_Peer") -> None:
        try:
            data = peer.connection.recv(2**20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        first, *others = data.split(b"\n")
        peer.begun.append(first)
        peer.size += len(first)
        for other in others:
            line, peer.begun, peer.size = b"".join(peer.begun), [other], len(other)
            if not self._take(line, peer):
                self._drop(peer)
                return
        if not data or peer.size > (_LONGEST_PROOF if peer.rank is None else _LONGEST_LINE):
            self._drop(peer)

    def _take(self, line: bytes, peer: "_Peer") -> bool:
        """Take a line; return False if it is no event, or does not prove that a new connection has the key."""
        if peer.rank is None:
            proof, nonce, rank, *_ = (*line.decode(errors="replace").split(" "), "", "")
            if not (hmac.compare_digest(proof.encode(), _prove(self.address.key, peer.nonce)) and rank.isdecimal()):
                return False
            peer.tell(_prove(self.address.key, nonce))
            peer.rank = int(rank)
            return True
        self._heard = time.monotonic()
        if line.startswith(b'{"time":'):  # by the worker's clock
            line = b'{"time":%.6f' % time.time() + line[line.index(b",") :]
        try:
            event = event_from_json(line)
        except ValidationError as error:
            _log.warning("rank %d sent what is no event: %s", peer.rank, error)
            return False
        try:
            self._receive(event, line)
        except Exception as error:  # noqa: BLE001 - a mistake of ours must not silence a worker
            _log.exception("an event was lost")
            said = f"an event of rank {peer.rank} was not recorded: {type(error).__name__}: {error}. log.txt has more."
            warned = Warned(message=said)
            self._receive(warned, event_to_json(warned))
        return True

    def _drop(self, peer: "_Peer") -> None:
        self._selector.unregister(peer.connection)
        del self._peers[peer.connection]
        if peer.rank is not None:
            self._hung_up(peer.rank)
        peer.connection.close()


class _Peer:
    """A connection to the inbox; a worker's once it has a rank."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.nonce, self.deadline = connection, secrets.token_hex(16), time.monotonic() + _PROOF_S
        self.rank: int | None = None
        self.is_stopping = False
        self.begun, self.size = list[bytes](), 0

    def tell(self, text: bytes) -> None:
        with suppress(OSError):  # it has ended, which is noticed when it is read
            self.connection.send(text + b"\n")


class DirectOutbox:
    """Outbox of a worker in the driver's own process, and what all have: they write files into the run's folder."""

    def __init__(self, folder: Path, receive: Receive, *, is_stopping: Callable[[], bool] = lambda: False) -> None:
        self._folder, self._receive, self._is_stopping = folder, receive, is_stopping

    @property
    def stop_asked(self) -> bool:
        """True if the training is asked to end early."""
        return self._is_stopping()

    def event(self, event: AnyEvent) -> None:
        """Pass the event on."""
        self._receive(event)

    def file(self, path: Path, name: str) -> None:
        """Copy a file into the run's folder. If that fails, an earlier one goes, too: it would be taken for the new."""
        place = self._folder / name
        partial = place.with_name(f"{place.name}.partial")
        with path.open("rb") as source:
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                with partial.open("wb") as file:
                    shutil.copyfileobj(source, file, 2**20)
                partial.replace(place)
            except OSError as error:  # a full disk is no failure of the training
                for each in (partial, place):
                    with suppress(OSError):
                        each.unlink()
                self.event(Warned(message=f"{name} can't be kept: {error.strerror or error}"))


class ChannelOutbox(DirectOutbox):
    """Worker's side of the channel. A thread sends, so that training doesn't wait for the network.

    A worker whose driver is gone ends itself, since it would only occupy its devices; it says its ``last_words``.
    """

    def __init__(self, address: Address, *, rank: int, folder: Path, last_words: str = "") -> None:
        super().__init__(folder, self._put, is_stopping=lambda: self._was_asked)
        self._was_asked = self._is_closing = False
        self._last_words = last_words
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._socket = connect(address.host, address.port, subject=socket.gethostname())
        self._said, nonce = self._socket.makefile("rb"), secrets.token_hex(16)
        try:
            proof = _prove(address.key, self._said.readline().decode(errors="replace").strip())
            self._socket.sendall(b"%s %s %d\n" % (proof, nonce.encode(), rank))
            answer = self._said.readline().strip()
        except TimeoutError as error:
            said = f"the driver at {address.host}:{address.port} does not answer rank {rank} within {CONNECT_S:g} s"
            raise ResourceError(f"{said}. If it has too many files open, start it after: ulimit -n 65536") from error
        if not hmac.compare_digest(answer, _prove(address.key, nonce)):
            self._said.close()
            self._socket.close()
            raise ConnectionError(f"what answers at {address.host}:{address.port} is not the driver of this run")
        self._socket.settimeout(None)
        self._sender = threading.Thread(target=self._send, name="outbox", daemon=True)
        self._listener = threading.Thread(target=self._listen, name="outbox-listener", daemon=True)
        self._sender.start()
        self._listener.start()

    def ask_to_stop(self) -> None:
        """Ask the training to end early from this side."""
        self._was_asked = True

    def close(self) -> None:
        """Send what is left and disconnect; wait until the driver has received everything."""
        self._is_closing = True
        self._queue.put(None)
        self._sender.join()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        self._listener.join(_SILENT_S)
        self._said.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _put(self, event: AnyEvent) -> None:
        self._queue.put(event_to_json(event) + b"\n")

    def _send(self) -> None:
        while (line := self._queue.get()) is not None:
            try:
                self._socket.sendall(line)
            except OSError:
                self._driver_is_gone()

    def _listen(self) -> None:
        with suppress(OSError, ValueError):
            for line in self._said:
                self._was_asked |= line == b"stop\n"
        if not self._is_closing:
            self._driver_is_gone()

    def _driver_is_gone(self) -> None:
        if self._last_words:
            sys.stderr.write(f"{self._last_words}\n")
            sys.stderr.flush()
        os._exit(1)  # an exception would only end this thread


def open_server(host: str) -> socket.socket:
    """Listen at a free port of an address of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=socket.SOMAXCONN)


def connect(host: str, port: int, *, subject: str) -> socket.socket:
    """Connect to the driver; ``subject`` is what can't, in the error's message."""
    try:
        return socket.create_connection((host, port), timeout=CONNECT_S)
    except OSError as error:
        raise ResourceError(
            f"{subject} can't connect to the driver at {host}:{port}: {error.strerror or error}. "
            "A firewall may drop the connection. Open all TCP ports between the nodes."
        ) from error


def _prove(key: str, nonce: str) -> bytes:
    return hmac.new(key.encode(), nonce.encode(), "sha256").hexdigest().encode()

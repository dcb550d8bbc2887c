"""The ranks that an outer launcher started, connected through torch's key-value store.

Each rank sends rank 0, the driver, facts about itself. Rank 0 sends the other ranks the next trial, and at last how the
run ended. Any rank may ask for a stop.
"""

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from datetime import timedelta
from functools import cache

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from pipeline.errors import ResourceError, UsageError
from pipeline.experiment.values import Frozen
from pipeline.plan.outer_launcher import OuterLauncher
from pipeline.protocol.channel.wire import Address
from pipeline.protocol.rank import GPU_VARIABLE
from pipeline.protocol.trial import Trial
from pipeline.worker import rendezvous
from pipeline.worker.interfaces import LOOPBACK, address_facing, is_loopback

_POLL_S, _LONGEST_POLL_S = 0.1, 1.0
_LISTEN_S = 0.5
_FAREWELL_S = 5.0
"""Seconds that rank 0, which may serve the store, waits until the other ranks know how the run ended."""
_ALL_INTERFACES = "0.0.0.0"  # noqa: S104 - see `_own_address`
_SHOWN = 8  # ranks


class Command(Frozen):
    """Message of rank 0 to the other ranks: the trial to start a worker for, or the end of the run."""

    trial: str = ""
    """JSON of the trial; empty at the end of the run."""
    channel: Address | None = None
    """Address of the trial's inbox."""
    meeting: str = ""
    """Name under which the trial's workers meet in the store."""
    gpus: tuple[int | None, ...] = ()
    """The trial's `Rank.gpu` of each rank."""
    exit_code: int = 0


class OuterGroup:
    """This process's membership in the group; rank 0's is the driver's."""

    def __init__(self, outer: OuterLauncher, *, timeout_s: float) -> None:
        """Connect to the store, which rank 0 opens unless the launcher serves one.

        Raises:
            ResourceError: rank 0's machine doesn't answer, or can't open the store.
        """
        self.outer = outer
        self.node = socket.gethostname()
        self.settings: Mapping[str, str] = {}
        """Settings of the experiment as this rank has read it."""
        self._timeout_s = timeout_s
        self._server = _opened(outer, timeout_s=timeout_s) if outer.is_driver and not outer.has_store else None
        self._host = _own_address(outer) if self._server is not None else outer.host
        self._store = self._connected()
        self._number = 0

    @property
    def address(self) -> str:
        """Address of this machine from which it reaches rank 0's."""
        return address_facing(outer.host) if (outer := self.outer).has_several_nodes else LOOPBACK

    def publish(self, facts: str) -> None:
        """Send rank 0 facts about this rank."""
        self._store.set(f"facts/{self.outer.rank}", facts)

    def report_failure(self, message: str) -> None:
        """Send rank 0 the error for which this rank can't take part; the first one counts."""
        if not self._store.check(["failure"]):
            self._store.set("failure", f"rank {self.outer.rank} on {self.node} could not start: {message}")

    def gathered(self) -> list[str]:
        """Wait for the facts of all ranks, and return them in the order of ranks. For rank 0.

        Raises:
            ResourceError: some ranks have not come within the timeout.
            UsageError: a rank could not start.
        """
        missing = set(range(self.outer.world_size))
        deadline = time.monotonic() + self._timeout_s
        while missing := {rank for rank in missing if not self._store.check([f"facts/{rank}"])}:
            if self._store.check(["failure"]):
                raise UsageError(self._store.get("failure").decode())
            if time.monotonic() > deadline:
                raise ResourceError(
                    f"{self.outer.name} started {self.outer.world_size} processes. {len(missing)} of them did not "
                    f"reach rank 0 on {self.node} within parallel.start_timeout_s ({self._timeout_s:g} s): "
                    f"rank {_join_some(sorted(missing))}"
                )
            time.sleep(_POLL_S)
        return [self._store.get(f"facts/{rank}").decode() for rank in range(self.outer.world_size)]

    def assign(self, trial: Trial, channel: Address, *, gpus: tuple[int | None, ...]) -> Command:
        """Have the other ranks start workers for a trial. For rank 0."""
        meeting = f"{trial.name}-{self.outer.attempt}-{self._number}"
        return self._send(Command(trial=trial.model_dump_json(), channel=channel, meeting=meeting, gpus=gpus))

    def end(self, exit_code: int) -> None:
        """Tell the other ranks how the run ended; wait a while until all that live know. For rank 0."""
        read, deadline = f"read/{self._number}", time.monotonic() + _FAREWELL_S
        self._send(Command(exit_code=exit_code))
        while self._store.add(read, 0) < self.outer.world_size - 1 and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def next_command(self, *, has_to_stop: Callable[[], bool] = lambda: False) -> Command:
        """Wait for rank 0's next command; ask it to stop the run if this rank has to. For the other ranks.

        Raises:
            DistError: rank 0 or its store is gone.
        """
        key, start = f"command/{self._number}", time.monotonic()
        while not self._store.check([key]):  # less and less often: rank 0 answers all ranks while it measures
            if has_to_stop():
                self._store.set("stop", "")
            time.sleep(min(max(_POLL_S, 0.1 * (time.monotonic() - start)), _LONGEST_POLL_S))
        command = Command.model_validate_json(self._store.get(key))
        if self._store.add(f"read/{self._number}", 1) == self.outer.world_size - 1:
            self._store.delete_key(key)  # it contains the key of the trial's channel
        self._number += 1
        return command

    def is_stop_asked(self) -> bool:
        """Return True once another rank has asked for a stop. For rank 0."""
        with suppress(RuntimeError):  # the launcher that serves the store has ended
            return bool(self._store.check(["stop"]))
        return False

    def variables(self, command: Command, *, cpus: int) -> dict[str, str]:
        """Return the variables of this rank's worker in a command's trial: those of torchrun, and its GPU."""
        gpu = command.gpus[self.outer.rank]
        return (
            self.outer.variables
            | ({} if gpu is None else {GPU_VARIABLE: str(gpu)})
            | {
                "MASTER_ADDR": self._host,
                "TORCHELASTIC_RUN_ID": command.meeting,
                "TORCHELASTIC_USE_AGENT_STORE": "True",  # opened by the driver, or by torchrun
                "OMP_NUM_THREADS": str(cpus),
            }
        )

    def _send(self, command: Command) -> Command:
        self._store.set(f"command/{self._number}", command.model_dump_json())
        self._number += 1
        return command

    def _connected(self) -> Store:
        host, port = self._host, self.outer.port
        if self._server is None:
            _await_server(host, port, timeout_s=self._timeout_s)
        timeout = timedelta(seconds=self._timeout_s)
        store = TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
        return PrefixStore(f"pipeline/{self.outer.attempt}", store)


@cache
def joined(outer: OuterLauncher, *, timeout_s: float) -> OuterGroup:
    """Return this process's group, and join it first at the first call; for the errors see `OuterGroup`."""
    return OuterGroup(outer, timeout_s=timeout_s)


def _opened(outer: OuterLauncher, *, timeout_s: float) -> TCPStore:
    host = _own_address(outer)
    try:
        return rendezvous.opened(host, outer.port, timeout=timedelta(seconds=timeout_s))
    except OSError as error:
        raise ResourceError(
            f"rank 0 can't listen at {host}:{outer.port}: {error.strerror or error}. For all ranks, set MASTER_ADDR to "
            f"an address of {socket.gethostname()}, where rank 0 runs, and MASTER_PORT to a free port."
        ) from error


def _own_address(outer: OuterLauncher) -> str:
    """Return the address at which rank 0 listens for the ranks of other machines."""
    if not outer.has_several_nodes:
        return LOOPBACK
    with suppress(OSError):
        if not is_loopback(found := _find_address(outer.host)):  # on a machine, its own name often leads to loopback
            return found
    return _ALL_INTERFACES


def _find_address(host: str) -> str:
    """Return an address of a host, one that other machines reach if it has any."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    addresses = [str(each[4][0]) for each in sorted(found, key=lambda each: each[0] == socket.AF_INET6)]  # prefer IPv4
    return next((each for each in addresses if not is_loopback(each)), addresses[0])


def _await_server(host: str, port: int, *, timeout_s: float) -> None:
    """Wait until something listens at the address: torch's own wait reacts to no signal."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with closing(socket.create_connection((host, port), timeout=_LISTEN_S)):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ResourceError(
                    f"{socket.gethostname()}: rank 0 doesn't answer at {host}:{port} within "
                    f"parallel.start_timeout_s ({timeout_s:g} s): {error.strerror or error}. "
                    "Set MASTER_ADDR to an address of rank 0's machine that all machines reach."
                ) from error
            time.sleep(_POLL_S)


def _join_some(values: Sequence[object]) -> str:
    return ", ".join(map(str, values[:_SHOWN])) + (", ..." if len(values) > _SHOWN else "")

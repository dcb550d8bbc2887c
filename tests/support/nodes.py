"""Real Ray nodes on one Linux machine, joined by links that can be cut and slowed down; needs root.

Each node has a network, host name and mount namespace of its own, so that nodes reach each other only through their
links, and paths in `Nodes.private` lead to other storage on each of them. A node's namespaces live as long as its
first process, a shell that starts what it is told to; nothing outside them changes.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import pytest

BIN = Path(sys.executable).parent
PATIENCE_S = 180.0
_PORT, _DASHBOARD_PORT = 6379, 8265
_INIT = """
hostname "$1"
mount --make-rprivate /
mount --bind "$2" "$3"
printf '127.0.0.1 localhost\\n127.0.1.1 %s\\n' "$1" > "$2/hosts"
mount --bind "$2/hosts" /etc/hosts
echo ready
while IFS= read -r line; do eval "$line" & done
"""
"""As on Debian, a node's own name leads to loopback: who resolves it gets an address that no other node can reach."""
_STARTED = "Ray runtime started"
_START = "for attempt in 1 2 3; do {command} > {log} 2>&1; grep -q '{started}' {log} && break; done"
"""Ray gives up after 30 s, which a busy machine may need."""
_ENTER = 'exec nsenter --target "$0" --net --mount --uts env --chdir="$PWD" "$@"'
_AWAIT = """
import sys, time
from ray._raylet import GcsClient
client = GcsClient(address=sys.argv[1])
deadline = time.monotonic() + float(sys.argv[3])
while sum(1 for node in client.get_all_node_info().values() if node.state == 0) != int(sys.argv[2]):
    if time.monotonic() > deadline:
        sys.exit(1)
    time.sleep(0.1)
"""


class Nodes:
    """A cluster of real ``ray start`` nodes, numbered from 0, the head; all is gone when the context ends."""

    def __init__(self, count: int = 2, *, cpus: int = 1, dashboard: bool = False, started: bool = True) -> None:
        """Skips the test that asks for nodes where they can't be had.

        Args:
            count: nodes.
            cpus: what each one declares.
            dashboard: whether the head also serves Ray's dashboard and its jobs API, see `dashboard`.
            started: whether Ray is started on all of them; otherwise `start` does it, the head first.
        """
        missing = [name for name in ("ip", "tc", "nsenter", "unshare", "mount") if shutil.which(name) is None]
        if missing or os.geteuid() != 0:
            pytest.skip(f"nodes in namespaces need root, iproute2 and util-linux; missing: {missing or 'root'}")
        allowed = subprocess.run(["unshare", "--net", "--mount", "--uts", "true"], capture_output=True, check=False)
        if allowed.returncode:  # what fails later is a failure
            pytest.skip(f"no namespaces on this machine: {allowed.stderr.decode().strip()}")
        self.count = count
        self._cpus = cpus
        self._with_dashboard = dashboard
        self._all_start = started
        self.address = f"{self.host(0)}:{_PORT}"
        self.dashboard = f"http://{self.host(0)}:{_DASHBOARD_PORT}"  # Reachable from inside the nodes only
        self.environment = {
            **os.environ,
            "RAY_AUTH_MODE": "disabled",  # else all need the same token in the home directory
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_enable_worker_prestart": "0",
            "OMP_NUM_THREADS": "1",
        }
        self.environment.pop("RAY_ADDRESS", None)
        self._shells: list[subprocess.Popen[str]] = []  # the first one is the hub, which no node is in

    @staticmethod
    def host(node: int) -> str:
        """IP address of a node; the same in every cluster, since clusters don't see each other."""
        return f"10.77.0.{node + 1}"

    @staticmethod
    def name(node: int) -> str:
        """Host name of a node."""
        return f"node{node}"

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="rn", dir="/tmp"))  # a socket's path must be short
        self.private = self.folder / "p"
        """On each node another folder, empty at first but for ``hosts`` and what Ray writes to ``ray``."""
        self.private.mkdir()
        try:
            self._shell("hub")
            self._hub("ip", "link", "add", "br0", "type", "bridge")
            self._hub("ip", "link", "set", "br0", "up")
            for node in range(self.count):
                self._shell(self.name(node))
                self._connect(node)
            if self._all_start:
                for node in range(self.count):
                    self.start(node)
                self.await_nodes(self.count)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for shell in self._shells:
            _kill([*_processes(shell), psutil.Process(shell.pid)] if shell.poll() is None else [])
        for shell in self._shells:
            shell.communicate()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(
        self,
        node: int,
        *,
        env: Mapping[str, str] | None = None,
        cpus: int | None = None,
        options: Sequence[str] = (),
        cwd: Path | None = None,
    ) -> None:
        """Start Ray on a node that has none; when the cluster counts it, `await_nodes` tells.

        Args:
            node: number of the node.
            env: variables that its processes, workers included, have besides `environment`.
            cpus: what it declares; by default what all do.
            options: further ones of ``ray start``.
            cwd: working directory; the node's private folder by default, where no code lies.
        """
        line = [str(BIN / "ray"), "start", "--block", "--disable-usage-stats", f"--node-ip-address={self.host(node)}"]
        line += [f"--num-cpus={self._cpus if cpus is None else cpus}", "--object-store-memory=100000000"]
        line += self._as_head() if node == 0 else [f"--address={self.address}"]
        line += options
        variables = [f"{name}={value}" for name, value in {**self.environment, **(env or {})}.items()]
        whole = ["env", f"--chdir={cwd or self.private}", "-i", *variables, *line]
        self.log(node).unlink(missing_ok=True)
        self._tell(node, _START.format(command=shlex.join(whole), log=self.log(node), started=_STARTED))
        self._await_start(node)

    def log(self, node: int) -> Path:
        """What ``ray start`` has printed on a node."""
        return self.folder / f"node{node}.log"

    def kill(self, node: int) -> None:
        """SIGKILL everything on a node."""
        _kill(_processes(self._shells[node + 1]))

    def cut(self, node: int) -> None:
        """Take a node's link down: nobody is told, packets are just gone."""
        self._hub("ip", "link", "set", f"port{node}", "down")

    def heal(self, node: int) -> None:
        """Undo `cut`."""
        self._hub("ip", "link", "set", f"port{node}", "up")

    def shape(self, node: int, mbit: float | None) -> None:
        """Limit a node's link to a rate in both directions; None takes the limit away."""
        for shell, device in ((node + 1, "eth0"), (0, f"port{node}")):
            with suppress(subprocess.CalledProcessError):  # there was no limit
                self._in(shell, "tc", "qdisc", "del", "dev", device, "root")
            if mbit is not None:
                shape = ["tbf", "rate", f"{mbit}mbit", "burst", "32kb", "limit", "4mb"]
                self._in(shell, "tc", "qdisc", "add", "dev", device, "root", *shape)

    def inside(self, node: int, command: Sequence[str | Path]) -> list[str]:
        """The command line that runs a command on a node, in the working directory that it is started in."""
        return ["sh", "-c", _ENTER, str(self._shells[node + 1].pid), *map(str, command)]

    def storage(self, node: int) -> Path:
        """Where a node's private folder lies on this machine."""
        return self.folder / self.name(node)

    def path(self, node: int, path: Path) -> Path:
        """What a node calls a path of this machine: another one only in its private folder."""
        own = self.storage(node)
        return self.private / path.relative_to(own) if path.is_relative_to(own) else path

    def processes(self, node: int) -> list[psutil.Process]:
        """All that runs on a node."""
        return _processes(self._shells[node + 1])

    def await_nodes(self, count: int) -> None:
        """Wait until that many nodes belong to the cluster."""
        command = self.inside(0, [sys.executable, "-c", _AWAIT, self.address, str(count), str(PATIENCE_S)])
        done = subprocess.run(command, check=False, env=self.environment, cwd=self.folder)
        logs = [self.log(node).read_text() for node in range(self.count) if self.log(node).exists()]
        assert done.returncode == 0, "\n".join([f"not {count} nodes", *logs])

    def _as_head(self) -> list[str]:
        dashboard = str(self._with_dashboard).lower()
        return [
            *("--head", f"--port={_PORT}", f"--temp-dir={self.private / 'ray'}", f"--include-dashboard={dashboard}"),
            *(f"--dashboard-host={self.host(0)}", f"--dashboard-port={_DASHBOARD_PORT}"),
        ]

    def _await_start(self, node: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not (self.log(node).exists() and _STARTED in self.log(node).read_text()):
            assert time.monotonic() < deadline, f"node {node} doesn't start: {self.log(node).read_text()}"
            time.sleep(0.1)

    def _shell(self, name: str) -> None:
        folder = self.folder / name
        folder.mkdir()
        line = ["unshare", "--net", "--mount", "--uts", "bash", "-ec", _INIT, "bash", name, folder, self.private]
        shell = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=self.folder)
        self._shells.append(shell)
        assert shell.stdout is not None
        assert shell.stdout.readline() == "ready\n", "the namespaces could not be set up; see above"

    def _connect(self, node: int) -> None:
        peer = ["peer", "name", "eth0", "netns", str(self._shells[-1].pid)]
        self._hub("ip", "link", "add", f"port{node}", "type", "veth", *peer)
        self._hub("ip", "link", "set", f"port{node}", "master", "br0", "up")
        for line in ("link set lo up", f"addr add {self.host(node)}/24 dev eth0", "link set eth0 up"):
            self._in(node + 1, "ip", *line.split())

    def _tell(self, node: int, line: str) -> None:
        stdin = self._shells[node + 1].stdin
        assert stdin is not None
        stdin.write(line + "\n")
        stdin.flush()

    def _hub(self, *command: str) -> None:
        self._in(0, *command)

    def _in(self, shell: int, *command: str) -> None:
        enter = ["nsenter", "--target", str(self._shells[shell].pid), "--net", "--mount"]
        subprocess.run([*enter, *command], check=True, capture_output=True, text=True)


def _processes(shell: subprocess.Popen[str]) -> list[psutil.Process]:
    """Everything in the shell's network namespace but itself."""
    own = Path(f"/proc/{shell.pid}/ns/net").stat().st_ino
    found = []
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if process.pid != shell.pid and Path(f"/proc/{process.pid}/ns/net").stat().st_ino == own:
                found.append(process)
    return found


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)
    psutil.wait_procs(processes, timeout=10)

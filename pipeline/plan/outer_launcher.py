"""Launchers that start this command as several processes, read from their environment variables.

``torchrun`` and ``srun`` start ``pipeline run`` once for each rank; rank 0's process is the driver.
A shell inside an allocation, such as that of ``salloc`` or of a batch script, is no rank: ``srun`` alone sets the
variables of a job step.
"""

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.errors import UsageError

_LOOPBACK = "127.0.0.1"
_DEFAULT_PORT = 29500
_FIRST_PORT, _PORTS = 20000, 10000
"""Ports below those that Linux gives to outgoing connections."""
_COUNTS = re.compile(r"(\d+)(?:\(x(\d+)\))?")

_OTHER_RANKS = (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))
"""Variables of platforms and of MPI, in which each process trains alone."""

Variables = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class OuterLauncher:
    """The launcher that started this process, and the process's place among the others."""

    name: str
    """torchrun or srun."""
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    """Name or address of rank 0's machine."""
    port: int
    """Port of the rendezvous at rank 0's machine."""
    has_store: bool = False
    """True if the launcher itself serves torch's key-value store at the port."""
    attempt: str = "0"
    """Number of the launch, which differs between restarts of all ranks that share a store."""

    @property
    def is_driver(self) -> bool:
        """True for rank 0, whose process is the driver."""
        return self.rank == 0

    @property
    def has_several_nodes(self) -> bool:
        """True if some ranks are on other machines."""
        return self.local_world_size < self.world_size

    @property
    def variables(self) -> dict[str, str]:
        """The variables of torchrun, which user code may read."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
        }


def outer_launcher(variables: Variables | None = None) -> OuterLauncher | None:
    """Return the launcher that started this process as one of several, by default from its environment; None without.

    Of nested launchers the inner one counts, e.g. torchrun under srun. A single process that srun started is None,
    too: it may start workers itself.

    Raises:
        UsageError: some variables of a launcher are missing, malformed, or contradict others.
    """
    given = os.environ if variables is None else variables
    names = _find_names(given)
    return _Reader(given, names).read() if names is not None else None


def find_ignored_ranks(variables: Variables | None = None) -> str:
    """Return the variables of several ranks that no known launcher has set, e.g. ``RANK=3, WORLD_SIZE=4``."""
    given = os.environ if variables is None else variables
    if outer_launcher(given) is not None:
        return ""
    for rank, size in _OTHER_RANKS:
        if given.get(size, "1") != "1":
            return ", ".join(f"{name}={given[name]}" for name in (rank, size) if name in given)
    return ""


def is_follower() -> bool:
    """Return True in a rank other than 0 of an outer launcher, whose driver is another process."""
    return (outer := outer_launcher()) is not None and not outer.is_driver


class _Names(NamedTuple):
    """Names of the variables in which a launcher says which of its processes this one is."""

    launcher: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str


_TORCHRUN = _Names("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def _find_names(given: Variables) -> _Names | None:
    """Return the variables of the innermost launcher; None without one.

    A batch script and a shell of salloc have a SLURM_PROCID, but no step.
    """
    if "TORCHELASTIC_RUN_ID" in given:
        return _TORCHRUN
    steps = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID", "SLURM_STEPID")
    if "SLURM_PROCID" not in given or not any(name in given for name in steps):
        return None
    # srun --preserve-env leaves the job's number of tasks in SLURM_NTASKS.
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in given else "SLURM_NTASKS"
    counts = "SLURM_TASKS_PER_NODE" if "SLURM_STEP_TASKS_PER_NODE" not in given else "SLURM_STEP_TASKS_PER_NODE"
    return _Names("srun", "SLURM_PROCID", size, "SLURM_LOCALID", counts)


class _Reader:
    """Reads the variables of a launcher."""

    def __init__(self, given: Variables, names: _Names) -> None:
        self._given, self._names = given, names

    def read(self) -> OuterLauncher | None:
        """Return the launcher; None if it started a single process, unless it is torchrun.

        Raises:
            UsageError: a variable is missing or malformed, or two contradict each other.
        """
        names, is_torchrun = self._names, self._names is _TORCHRUN
        world_size = self._number(names.world_size)
        if world_size == 1 and not is_torchrun:
            return None
        local_world_size = self._local_world_size()
        outer = OuterLauncher(
            name=names.launcher,
            host=self._host(is_one=local_world_size >= world_size),
            rank=self._number(names.rank),
            world_size=world_size,
            local_rank=self._number(names.local_rank),
            local_world_size=local_world_size,
            port=self._number("MASTER_PORT") if is_torchrun or "MASTER_PORT" in self._given else self._derive_port(),
            has_store=is_torchrun and self._given.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=self._given.get("TORCHELASTIC_RESTART_COUNT", "0") if is_torchrun else "0",
        )
        self._check(outer)
        return outer

    def _text(self, name: str) -> str:
        if name not in self._given:
            raise UsageError(f"started by {self._names.launcher}, but {name} is not set")
        return self._given[name]

    def _number(self, name: str) -> int:
        text = self._text(name)
        if not (text.isascii() and text.isdecimal()):
            raise UsageError(f"started by {self._names.launcher}, but {name}={text} is not a number")
        return int(text)

    def _local_world_size(self) -> int:
        """Return the number of processes on this node, which srun gives for each node, e.g. as ``2(x3),1``."""
        name = self._names.local_world_size
        if self._names.launcher != "srun":
            return self._number(name)
        counts, node = self._text(name), self._number("SLURM_NODEID")
        each = [int(count) for count, times in _COUNTS.findall(counts) for _ in range(int(times or 1))]
        if node >= len(each):
            raise UsageError(f"started by srun, but SLURM_NODEID={node} is no node of {name}={counts}")
        return each[node]

    def _host(self, *, is_one: bool) -> str:
        """Return the host of rank 0."""
        if is_one and self._names is not _TORCHRUN:
            return _LOOPBACK
        if "MASTER_ADDR" not in self._given and self._names is not _TORCHRUN:
            raise UsageError(
                "started by srun on several machines, but MASTER_ADDR, the name of the first one, is not set. "
                'Set it before srun: export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
            )
        return self._text("MASTER_ADDR")

    def _derive_port(self) -> int:
        """Return a port that all ranks derive from the same job, and other jobs rarely share."""
        get = self._given.get
        identity = f"{get('SLURM_JOB_ID', '')}.{get('SLURM_STEP_ID', '')}".strip(".")
        return _FIRST_PORT + zlib.crc32(identity.encode()) % _PORTS if identity else _DEFAULT_PORT

    def _check(self, outer: OuterLauncher) -> None:
        """Check that the variables go together; an error names both of two that don't."""
        _, rank, world_size, local_rank, local_world_size = self._names
        for value, name, most, limit in (
            (outer.rank, rank, outer.world_size, world_size),
            (outer.local_rank, local_rank, outer.local_world_size, local_world_size),
        ):
            if value >= most:
                raise UsageError(f"{name}={value} and {limit}={most} contradict each other: ranks count from 0")
        if outer.local_world_size > outer.world_size:
            raise UsageError(
                f"{local_world_size} says {outer.local_world_size} processes on this machine, but {world_size} says "
                f"{outer.world_size} in all"
            )
        # Scripts that were written for torch often export these; a rank that is the same for all tasks would hang.
        for own, name in zip(_TORCHRUN[1:4], self._names[1:4], strict=True):
            exported, here = self._given.get(own), outer.variables[own]
            if exported not in {None, here}:
                raise UsageError(f"{own}={exported} and {name}={here} contradict each other; unset {own}")

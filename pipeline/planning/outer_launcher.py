"""Launchers that start this command as several processes, read from their environment variables.

``torchrun``, ``srun`` and ``mpirun`` start ``pipeline run`` once for each rank; rank 0's process is the driver.
A shell inside an allocation, such as that of ``salloc`` or of a batch script, is no rank: ``srun`` alone sets the
variables of a job step.
"""

import os
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pipeline.errors import UsageError
from pipeline.planning.slurm_hosts import first_in_host_file, hosts_of

_LOOPBACK = "127.0.0.1"
_DEFAULT_PORT = 29500
_FIRST_PORT, _PORTS = 20000, 10000
"""Ports below those that Linux gives to outgoing connections."""
_COUNTS = re.compile(r"(\d+)(?:\(x(\d+)\))?")

Variables = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class OuterLauncher:
    """The launcher that started this process, and the process's place among the others."""

    name: str
    """torchrun, srun or mpirun."""
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    """Name or address of rank 0's machine."""
    port: int
    """Port of the rendezvous at rank 0's machine."""
    hosts: tuple[str, ...] = ()
    """Names of the job's machines, rank 0's first; empty if the launcher does not name them."""
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

    Of nested launchers the inner one counts, e.g. torchrun under srun. A single process that srun or mpirun started
    is None, too: it may start workers itself.

    Raises:
        UsageError: some variables of a launcher are missing, malformed, or contradict others.
    """
    given = os.environ if variables is None else variables
    for read in (_torchrun, _open_mpi, _pmi, _srun):
        if (found := read(given)) is not None:
            return found if found.world_size > 1 or found.name == "torchrun" else None
    return None


def find_ignored_ranks(variables: Variables | None = None) -> str:
    """Return the variables of several ranks that no known launcher has set, e.g. ``RANK=3, WORLD_SIZE=4``."""
    given = os.environ if variables is None else variables
    if given.get("WORLD_SIZE", "1") == "1" or outer_launcher(given) is not None:
        return ""
    return ", ".join(f"{name}={given[name]}" for name in ("RANK", "WORLD_SIZE") if name in given)


def is_follower() -> bool:
    """Return True in a rank other than 0 of an outer launcher, whose driver is another process."""
    return (outer := outer_launcher()) is not None and not outer.is_driver


def _torchrun(given: Variables) -> OuterLauncher | None:
    if "TORCHELASTIC_RUN_ID" not in given:
        return None
    number = _reader(given, "torchrun")
    return _checked(
        given,
        rank=("RANK", number("RANK")),
        world_size=("WORLD_SIZE", number("WORLD_SIZE")),
        local_rank=("LOCAL_RANK", number("LOCAL_RANK")),
        local_world_size=("LOCAL_WORLD_SIZE", number("LOCAL_WORLD_SIZE")),
        name="torchrun",
        host=_text(given, "torchrun", "MASTER_ADDR"),
        port=number("MASTER_PORT"),
        has_store=given.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=given.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def _open_mpi(given: Variables) -> OuterLauncher | None:
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    if not any(name in given for name in names):
        return None
    return _mpirun(given, *names, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")


def _pmi(given: Variables) -> OuterLauncher | None:
    """Read the variables of MPICH, Intel MPI and others; ``srun --mpi=pmi2`` sets them beside its own."""
    if not any(name in given for name in ("PMI_RANK", "PMI_SIZE")):
        return None
    slurm = _srun(given)
    same = slurm is not None and (str(slurm.rank), str(slurm.world_size))
    if same == (given.get("PMI_RANK"), given.get("PMI_SIZE")):  # srun --mpi=pmi2
        return slurm
    local = ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")
    return _mpirun(given, "PMI_RANK", "PMI_SIZE", *(local if local[0] in given else _HYDRA))


_HYDRA = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def _mpirun(given: Variables, rank: str, size: str, local_rank: str, local_size: str) -> OuterLauncher | None:
    number = _reader(given, "mpirun")
    world_size = number(size)
    alone = world_size == 1  # runtimes leave some of the variables out then
    local = 1 if alone else number(local_size)
    hosts = _hosts(given)
    host = _LOOPBACK if local >= world_size else given.get("MASTER_ADDR") or next(iter(hosts), "")
    if not host:
        raise UsageError(
            "started by mpirun on several machines, but MASTER_ADDR is not set, the name or address of the first one; "
            "write mpirun -x MASTER_ADDR=HOST ... (Open MPI) or mpirun -genv MASTER_ADDR HOST ... (MPICH, Intel MPI)"
        )
    identity = next(filter(None, map(given.get, ("PMIX_NAMESPACE", "PMI_JOBID", "SLURM_JOB_ID"))), "")
    return _checked(
        given,
        rank=(rank, number(rank)),
        world_size=(size, world_size),
        local_rank=(local_rank, 0 if alone else number(local_rank)),
        local_world_size=(local_size, local),
        name="mpirun",
        host=host,
        port=_port(given, "mpirun", identity=identity),
        hosts=hosts,
    )


def _srun(given: Variables) -> OuterLauncher | None:
    """Read the variables of a job step; a batch script and a shell of salloc have a SLURM_PROCID, too, but no step."""
    if "SLURM_PROCID" not in given or not any(name in given for name in _STEP):
        return None
    number = _reader(given, "srun")
    # srun --preserve-env leaves the job's number of tasks in SLURM_NTASKS.
    size = next((name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if name in given), "SLURM_NTASKS")
    world_size = number(size)
    if world_size == 1:
        return OuterLauncher(
            name="srun", rank=0, world_size=1, local_rank=0, local_world_size=1, host=_LOOPBACK, port=_DEFAULT_PORT
        )
    hosts = _hosts(given)
    counts, local_size = _tasks_on_this_node(given, hosts, world_size=world_size)
    if local_size < world_size and "SLURM_HOSTFILE" in given and "MASTER_ADDR" not in given:  # node lists are sorted
        first = first_in_host_file(given["SLURM_HOSTFILE"])
        hosts = (first, *(host for host in hosts if host != first))
    host = _LOOPBACK if local_size >= world_size else given.get("MASTER_ADDR") or next(iter(hosts), "")
    if not host:
        raise UsageError("started by srun, but neither SLURM_STEP_NODELIST nor MASTER_ADDR is set")
    return _checked(
        given,
        rank=("SLURM_PROCID", number("SLURM_PROCID")),
        world_size=(size, world_size),
        local_rank=("SLURM_LOCALID", number("SLURM_LOCALID")),
        local_world_size=(counts, local_size),
        name="srun",
        host=host,
        port=_port(given, "srun", identity=f"{given.get('SLURM_JOB_ID', '')}.{given.get('SLURM_STEP_ID', '')}"),
        hosts=hosts,
    )


_STEP = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID", "SLURM_STEPID")


def _tasks_on_this_node(given: Variables, hosts: tuple[str, ...], *, world_size: int) -> tuple[str, int]:
    """Return the number of tasks on this node, and the variable that says it, e.g. ``2(x3),1`` for each node."""
    name = next((name for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") if name in given), "")
    if not name:
        if len(hosts) == 1:
            return "SLURM_STEP_NODELIST", world_size
        raise UsageError("started by srun, but SLURM_STEP_TASKS_PER_NODE is not set")
    node = _reader(given, "srun")("SLURM_NODEID")
    for count, times in _COUNTS.findall(given[name]):
        if node < (nodes := int(times or 1)):
            return name, int(count)
        node -= nodes
    raise UsageError(f"started by srun, but SLURM_NODEID={given['SLURM_NODEID']} is no node of {name}={given[name]}")


def _hosts(given: Variables) -> tuple[str, ...]:
    """Return the hosts of the job step, or of the job."""
    name = next((name for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST") if given.get(name)), "")
    try:
        return tuple(hosts_of(given.get(name, "")))
    except ValueError:
        raise UsageError(f"{name}={given[name]}: not a node list of Slurm, such as gpu[01-03,7],login1") from None


def _port(given: Variables, launcher: str, *, identity: str) -> int:
    """Return MASTER_PORT, else a port that all ranks derive from the same job, and other jobs rarely share."""
    if "MASTER_PORT" in given:
        return _reader(given, launcher)("MASTER_PORT")
    return _FIRST_PORT + zlib.crc32(identity.encode()) % _PORTS if identity.strip(".") else _DEFAULT_PORT


def _reader(given: Variables, launcher: str) -> Callable[[str], int]:
    """Return a function that reads a variable of a launcher as a number.

    Raises:
        UsageError: from that function, if the variable is missing or no number.
    """

    def number(name: str) -> int:
        text = _text(given, launcher, name)
        if not (text.isascii() and text.isdecimal()):
            raise UsageError(f"started by {launcher}, but {name}={text} is not a number")
        return int(text)

    return number


def _text(given: Variables, launcher: str, name: str) -> str:
    if name not in given:
        raise UsageError(f"started by {launcher}, but {name} is not set")
    return given[name]


def _checked(
    given: Variables,
    *,
    rank: tuple[str, int],
    world_size: tuple[str, int],
    local_rank: tuple[str, int],
    local_world_size: tuple[str, int],
    **more: object,
) -> OuterLauncher:
    """Return the launcher, after a check that its variables, each with its name, go together.

    Raises:
        UsageError: two variables contradict each other; names both.
    """
    for (name, value), (limit, most) in ((rank, world_size), (local_rank, local_world_size)):
        if value >= most:
            raise UsageError(f"{name}={value} and {limit}={most} contradict each other: ranks count from 0")
    if local_world_size[1] > world_size[1]:
        raise UsageError(
            f"{local_world_size[0]} says {local_world_size[1]} processes on this machine, but {world_size[0]} says "
            f"{world_size[1]} in all"
        )
    # Scripts that were written for torch often export these; a rank that is the same for all tasks would hang.
    for own, (name, value) in {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": local_rank}.items():
        if own in given and given[own] != str(value):
            raise UsageError(f"{own}={given[own]} and {name}={value} contradict each other; unset {own}")
    numbers = {"rank": rank, "world_size": world_size, "local_rank": local_rank, "local_world_size": local_world_size}
    return OuterLauncher(**{name: value for name, (_, value) in numbers.items()}, **more)  # type: ignore[arg-type]

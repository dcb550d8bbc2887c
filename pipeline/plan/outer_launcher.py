"""Launchers that start this command as several processes, read from their environment variables.

``torchrun`` and ``srun`` start ``pipeline run`` once for each rank; rank 0's process is the driver. A shell inside an
allocation, as of ``salloc`` or of a batch script, is no rank: ``srun`` alone sets the variables of a job step.
"""

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.errors import UsageError

_OTHER_RANKS = (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))
"""Variables of platforms and of MPI, in which each process trains alone."""
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True, kw_only=True)
class OuterLauncher:
    """The launcher that started this process, and the process's place among the others."""

    name: str  # torchrun or srun
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str  # Name or address of rank 0's machine
    port: int  # Port of the rendezvous at rank 0's machine
    has_store: bool = False  # True if the launcher itself serves torch's key-value store at the port
    attempt: str = "0"  # Number of the launch, which differs between restarts of all ranks that share a store

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
        ranks = {name: str(getattr(self, name.lower())) for name in _TORCHRUN}
        return {**ranks, "MASTER_ADDR": self.host, "MASTER_PORT": str(self.port)}


def outer_launcher(variables: Mapping[str, str] | None = None) -> OuterLauncher | None:
    """Return the launcher that started this process as one of several, by default from its environment; None without.

    Of nested launchers the inner one counts, e.g. torchrun under srun. A single process that srun started is None,
    too: it may start workers itself.
    """
    given = os.environ if variables is None else variables
    is_torchrun = "TORCHELASTIC_RUN_ID" in given
    if is_torchrun:
        launcher, names = "torchrun", _TORCHRUN
    elif "SLURM_PROCID" in given and any(name in given for name in ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID")):
        # srun --preserve-env leaves the job's number of tasks in SLURM_NTASKS.
        size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in given else "SLURM_NTASKS"
        each = "SLURM_STEP_TASKS_PER_NODE" if "SLURM_STEP_TASKS_PER_NODE" in given else "SLURM_TASKS_PER_NODE"
        launcher, names = "srun", ("SLURM_PROCID", size, "SLURM_LOCALID", each)
    else:
        return None

    def text(name: str) -> str:
        if name not in given:
            raise UsageError(f"started by {launcher}, but {name} is not set")
        return given[name]

    def number(name: str) -> int:
        if not (text(name).isascii() and text(name).isdecimal()):
            raise UsageError(f"started by {launcher}, but {name}={text(name)} is not a number")
        return int(text(name))

    rank, world_size, local_rank = map(number, names[:3])
    if world_size == 1 and not is_torchrun:
        return None
    if is_torchrun:
        local_world_size = number(names[3])
    else:  # for each node, e.g. 2(x3),1
        counts, node = re.findall(r"(\d+)(?:\(x(\d+)\))?", text(names[3])), number("SLURM_NODEID")
        tasks = [int(count) for count, times in counts for _ in range(int(times or 1))]
        if node >= len(tasks):
            raise UsageError(f"started by srun, but SLURM_NODEID={node} is no node of {names[3]}={text(names[3])}")
        local_world_size = tasks[node]
    host = "127.0.0.1"
    if is_torchrun or local_world_size < world_size:
        if "MASTER_ADDR" not in given and not is_torchrun:
            raise UsageError(
                "started by srun on several machines, but MASTER_ADDR, the name of the first one, is not set. "
                'Set it before srun: export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
            )
        host = text("MASTER_ADDR")
    # A port that all ranks derive from the same job, below those that Linux gives to outgoing connections.
    job = f"{given.get('SLURM_JOB_ID', '')}.{given.get('SLURM_STEP_ID', '')}"
    outer = OuterLauncher(
        name=launcher,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        host=host,
        port=number("MASTER_PORT")
        if is_torchrun or "MASTER_PORT" in given
        else 20000 + zlib.crc32(job.encode()) % 10000,
        has_store=is_torchrun and given.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=given.get("TORCHELASTIC_RESTART_COUNT", "0") if is_torchrun else "0",
    )
    for value, most, name, limit in ((rank, world_size, 0, 1), (local_rank, local_world_size, 2, 3)):
        if value >= most:
            raise UsageError(
                f"{names[name]}={value} and {names[limit]}={most} contradict each other: ranks count from 0"
            )
    # Scripts that were written for torch often export these; a rank that is the same for all tasks would hang.
    for own, theirs in zip(_TORCHRUN[:3], names[:3], strict=True):
        if (exported := given.get(own)) not in {None, here := outer.variables[own]}:
            raise UsageError(f"{own}={exported} and {theirs}={here} contradict each other; unset {own}")
    return outer


def find_ignored_ranks() -> str:
    """Return the variables of several ranks that no known launcher has set, e.g. ``RANK=3, WORLD_SIZE=4``."""
    for rank, size in _OTHER_RANKS:
        if os.environ.get(size, "1") != "1" and outer_launcher() is None:
            return ", ".join(f"{name}={os.environ[name]}" for name in (rank, size) if name in os.environ)
    return ""


def is_follower() -> bool:
    """Return True in a rank other than 0 of an outer launcher, whose driver is another process."""
    return (outer := outer_launcher()) is not None and not outer.is_driver

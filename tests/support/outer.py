"""Launchers that start the command as several processes: their variables, as they set them."""

from command import line_of


def outer_torchrun(
    rank: int = 0, world_size: int = 2, *, local_world_size: int | None = None, host: str = "127.0.0.1", port: int = 1
) -> dict[str, str]:
    """Return torchrun's variables of a rank; its agent serves the store."""
    local = local_world_size or world_size
    return {
        "TORCHELASTIC_RUN_ID": "outer",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank % local),
        "LOCAL_WORLD_SIZE": str(local),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }


def srun(
    rank: int = 0,
    tasks: int = 2,
    *,
    host: str = "",
    per_node: str | None = None,
    node: int = 0,
    local_rank: int | None = None,
    job: int = 4711,
) -> dict[str, str]:
    """Return Slurm's variables of a task of a job step; a batch script's shell has the first group only."""
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_NTASKS": str(tasks),
        "SLURM_TASKS_PER_NODE": per_node or str(tasks),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank if local_rank is None else local_rank),
        "SLURM_NODEID": str(node),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_TASKS_PER_NODE": per_node or str(tasks),
        **({"MASTER_ADDR": host} if host else {}),
    }


def run_line(*arguments: str) -> list[str]:
    """Command line of a rank."""
    return line_of("run", "lab.yaml", *arguments)

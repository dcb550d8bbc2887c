"""Launchers that start the command as several processes: their variables, as they set them, and such processes."""

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Self

import pytest
from command import Ended
from waiting import eventually

from pipeline.protocol.events import AnyEvent, Metrics
from pipeline.record import journal

PATIENCE_S = 200.0


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


class Ranks:
    """``pipeline run lab.yaml`` as one process for each rank; a context manager that leaves none of them behind.

    Args:
        lines: command line of each rank.
        environments: variables of each rank, besides those of this process.
        cwd: working directory of all.
    """

    def __init__(self, lines: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], *, cwd: Path) -> None:
        base = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        self.cwd = cwd
        self.processes = [
            subprocess.Popen(
                line,
                env={**base, **environment},
                cwd=cwd,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for line, environment in zip(lines, environments, strict=True)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    @property
    def events(self) -> list[AnyEvent]:
        """Events of the only run in the working directory, as far as they are written."""
        journals = list((self.cwd / "runs").glob(f"*/{journal.FILE_NAME}"))
        return list(journal.read(journals[0])) if journals else []

    def await_step(self, step: int) -> None:
        """Wait until training has reported a step."""

        def reached() -> bool:
            if any(process.poll() is not None for process in self.processes):
                pytest.fail(f"a rank has ended before step {step}: {self.ended()}")
            with suppress(ValueError, OSError):  # the journal is being written
                return any(isinstance(event, Metrics) and event.step >= step for event in self.events)
            return False

        eventually(reached, timeout_s=PATIENCE_S, what=f"step {step}")

    def ended(self) -> list[Ended]:
        """Wait for the ends of all ranks."""
        with ThreadPoolExecutor(len(self.processes)) as pool:  # pipes of a rank that isn't read would fill up
            outputs = list(pool.map(lambda process: process.communicate(timeout=PATIENCE_S), self.processes))
        return [Ended(process.returncode, *output) for process, output in zip(self.processes, outputs, strict=True)]


def losses(events: Iterable[AnyEvent]) -> dict[int, float]:
    """Losses by step."""
    points = [point for event in events if isinstance(event, Metrics) for point in event.points]
    return {point.step: point.value for point in points if point.name == "train/loss"}


def run_line(*arguments: str) -> list[str]:
    """Command line of a rank."""
    return [sys.executable, "-m", "pipeline", "run", "lab.yaml", *arguments]

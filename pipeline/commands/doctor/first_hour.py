"""Checklist for the first hour on a new cluster: what the doctor has checked, and what only a run can show."""

import os
from collections.abc import Iterator, Sequence
from typing import Literal

from pipeline.commands.doctor.check_result import CheckResult, Status
from pipeline.config.values import Frozen

Progress = Status | Literal["open"]
"""Status of a step; open: the doctor can't check it."""
_SEVERITY: tuple[Status, ...] = ("ok", "warning", "problem")
_RAY = (
    "pipeline run FILE --no-baseline --address {address} parallel.workers=2",
    "parallel.placement=strict_spread parallel.max_failures=1",
)
_SLURM = (
    "srun --nodes=2 --ntasks-per-node=1 python -m pipeline run FILE --no-baseline",
    "parallel.launcher=torchrun parallel.workers=2",
)


class Step(Frozen):
    """Step of the checklist: a command, and the result to expect, in one line of a terminal."""

    ray: str
    """Text on a Ray cluster; empty: the step is for Slurm only."""
    slurm: str = ""
    """Text in a job of Slurm; empty: as on a Ray cluster."""
    checks: tuple[str, ...] = ()
    """Subjects of the checks that answer it on a Ray cluster; empty: the doctor can't know."""

    def progress(self, findings: Sequence[CheckResult]) -> tuple[Progress, str]:
        """Return the step's status on a Ray cluster, and the text to show."""
        found = {subject: _worst_status(findings, subject) for subject in self.checks}
        bad = [subject for subject, status in found.items() if status not in ("ok", None)]
        if bad:
            worst = max((status for status in found.values() if status), key=_SEVERITY.index)
            return worst, f"{', '.join(bad)}: see above"
        return ("ok" if found and None not in found.values() else "open"), self.ray


STEPS = (
    Step(
        ray="nodes, versions, clocks: all answer, same versions, within 1 s",
        slurm="srun --nodes=2 date +%T.%N: clocks differ by less than 1 s",
        checks=("nodes", "versions", "clocks"),
    ),
    Step(
        ray="limits (ulimit -n), memory, disk: enough on each node",
        slurm="srun --nodes=2 pipeline doctor: all checks pass on each node",
        checks=("limits", "memory", "shared memory", "disk"),
    ),
    Step(
        ray="interface, link: no faster interface found; 1 Gbit/s or more",
        slurm="srun --nodes=2 getent hosts NODE: its address in the fast network",
        checks=("interface", "link"),
    ),
    Step(
        ray="MLflow: the store can be reached and written",
        slurm="MLflow: a server, or one SQLite file per job, with POSIX locks",
        checks=("MLflow",),
    ),
    Step(ray="RUN --quick: exit code 0, on two nodes (firewall: parallel.ports)"),
    Step(
        ray="during RUN, RUN --resume on another node: error names the first node",
        slurm="during RUN, RUN --resume in another job: error names the first node",
    ),
    Step(
        ray="RUN, kill -9 a worker: resumes from a checkpoint, and completes",
        slurm="RUN, kill -9 a rank: ends and names it; RUN --resume completes",
    ),
    Step(
        ray="RUN, Ctrl-C, RUN --resume: continues after the last step",
        slurm="RUN, scancel --signal=TERM JOBID, RUN --resume: no step is lost",
    ),
    Step(ray="RUN with GPUs, nvidia-smi on both nodes: one GPU for each worker"),
    Step(ray="", slurm="pipeline submit FILE --slurm | sbatch --time=5: requeued, resumes"),
)


def applies_to(address: str | None) -> bool:
    """Return True for a Ray cluster, and once in a job of Slurm."""
    return address is not None or ("SLURM_JOB_ID" in os.environ and os.environ.get("SLURM_PROCID", "0") == "0")


def headline(address: str | None) -> tuple[str, ...]:
    """Return the lines that say what RUN is; without an address, in a job of Slurm."""
    command = _SLURM if address is None else (_RAY[0].format(address=address), *_RAY[1:])
    return ("First hour on a new cluster. RUN is this command (FILE has strategy ddp):", *(f"  {c}" for c in command))


def checklist(findings: Sequence[CheckResult], *, address: str | None) -> Iterator[tuple[Progress, str]]:
    """Yield each step's status and text, with its number; results on one machine don't answer for a Slurm job."""
    steps = [step for step in STEPS if step.ray or address is None]
    for number, step in enumerate(steps, start=1):
        if address is None:
            yield "open", f"{number:>2} {step.slurm or step.ray}"
        else:
            progress, text = step.progress(findings)
            yield progress, f"{number:>2} {text}"


def _worst_status(findings: Sequence[CheckResult], subject: str) -> Status | None:
    """Return the worst status of a check; None if it was not done."""
    found = [finding.status for finding in findings if finding.subject == subject]
    return max(found, key=_SEVERITY.index, default=None)

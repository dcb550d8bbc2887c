"""A stand-in for Slurm on this machine: a job's batch shell, and srun, scancel and scontrol for it.

As in Slurm's source, it is not kind: srun answers SIGTERM by killing its tasks, scancel ends the batch shell's children
and all tasks at once, and a job that is requeued is ended like one that is cancelled.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[2] / "templates/ddp-project/{{cookiecutter.__project_slug}}/job.sbatch"
_LOG, _BATCH = "slurm.log", "batch.pid"
_ONCE_KNOWN = 'until [ -e "$0" ]; do sleep 0.01; done; exec "$@"'
"""Shell code of a task: Slurm knows all tasks of a step, and so signals them, before the first one runs."""


class Slurm:
    """One job, which may run several times.

    Args:
        folder: an empty folder for the commands and their records.
        job: the job's number.
        cwd: folder that the job is submitted in.
        tasks: tasks of a step that does not say how many.
    """

    def __init__(self, folder: Path, *, job: int, cwd: Path, tasks: int = 1) -> None:
        self.folder = folder
        bin_ = folder / "bin"
        bin_.mkdir(parents=True, exist_ok=True)
        for name in ("srun", "scancel", "scontrol"):
            (bin_ / name).write_text(f'#!/bin/sh\nexec {sys.executable} -S {__file__} {folder} {name} "$@"\n')
            (bin_ / name).chmod(0o755)
        self.environment = {
            **os.environ,
            "PATH": f"{bin_}:{os.environ['PATH']}",
            "SLURM_JOB_ID": str(job),
            "SLURM_SUBMIT_DIR": str(cwd),
            "SLURM_JOB_NODELIST": "here",
            "SLURM_NTASKS": str(tasks),
            "SLURM_NTASKS_PER_NODE": str(tasks),
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_CPUS_PER_TASK": "1",
        }

    @property
    def commands(self) -> list[str]:
        """Command lines of srun and scontrol so far."""
        log = self.folder / _LOG
        return log.read_text().splitlines() if log.exists() else []

    @property
    def requeued(self) -> list[str]:
        """Jobs that were requeued, in order."""
        return [line.split()[-1] for line in self.commands if line.startswith("scontrol requeue")]

    @contextmanager
    def start(self, script: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """Run a batch script; at the end of the block nothing of the job is left."""
        streams: Mapping[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        line = ["bash", str(script), *arguments]
        with subprocess.Popen(line, env=self.environment, process_group=0, **streams) as batch:
            (self.folder / _BATCH).write_text(str(batch.pid))
            try:
                yield batch
            finally:
                for group in (batch.pid, *_tasks(self.folder)):
                    _signal_group(group, signal.SIGKILL)

    def near_time_limit(self, batch: subprocess.Popen[str], script: Path) -> None:
        """Send the signal of ``#SBATCH --signal=B:...`` to the batch shell alone."""
        found = re.search(r"^#SBATCH --signal=B:(\w+)@", script.read_text(), re.MULTILINE)
        assert found is not None
        batch.send_signal(signal.Signals[f"SIG{found[1]}"])

    def cancel(self) -> None:
        """End the job as ``scancel JOBID`` does; the caller waits for its end."""
        _end_job(self.folder)


def _end_job(folder: Path) -> None:
    """Send SIGTERM to all processes of the job's steps, of which the batch shell with its children is one."""
    for group in (*_tasks(folder), int((folder / _BATCH).read_text())):
        _signal_group(group, signal.SIGTERM)


def _tasks(folder: Path) -> list[int]:
    return [int(path.suffix[1:]) for path in folder.glob("task.*")]


def _signal_group(group: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def _srun(folder: Path, arguments: list[str]) -> int:
    """Start the tasks, each in a session of its own, and return the greatest exit code."""
    options = {}
    while arguments[0].startswith("--"):
        name, _, value = arguments.pop(0).partition("=")
        options[name] = value
    count = int(options.get("--ntasks", os.environ["SLURM_NTASKS"]))
    step = {
        "STEP_ID": "0",
        "STEP_NUM_TASKS": count,
        "STEP_TASKS_PER_NODE": count,
        "NODEID": "0",
    }
    tasks: list[subprocess.Popen[bytes]] = []
    is_terminated = False

    def force_termination(*_: object) -> None:
        nonlocal is_terminated
        is_terminated = True
        for task in tasks:
            _signal_group(task.pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, force_termination)
    known = folder / f"step.{os.getpid()}"
    for rank in range(count):
        own = {f"SLURM_{name}": str(value) for name, value in {**step, "PROCID": rank, "LOCALID": rank}.items()}
        line = ["sh", "-c", _ONCE_KNOWN, str(known), *arguments]
        tasks.append(subprocess.Popen(line, env={**os.environ, **own}, start_new_session=True))
        (folder / f"task.{tasks[-1].pid}").touch()
    if is_terminated:  # while a task was being started
        force_termination()
    known.touch()
    codes = [task.wait() for task in tasks]
    known.unlink()
    for task in tasks:
        (folder / f"task.{task.pid}").unlink()
    return max(code if code >= 0 else 128 - code for code in codes)


def _scancel(folder: Path, arguments: list[str]) -> int:
    """Signal the tasks of all steps, or with ``--batch`` the batch shell alone."""
    number = next(signal.Signals[f"SIG{word[9:]}"] for word in arguments if word.startswith("--signal="))
    if "--batch" in arguments:
        os.kill(int((folder / _BATCH).read_text()), number)
    else:
        for task in _tasks(folder):
            _signal_group(task, number)
    return 0


def _scontrol(folder: Path, arguments: list[str]) -> int:
    if arguments[0] == "show":
        sys.stdout.write(f"{os.uname().nodename}\n")
    else:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _end_job(folder)
    return 0


def _main(place: str, name: str, *arguments: str) -> int:
    folder = Path(place)
    with (folder / _LOG).open("a") as log:
        log.write(f"{' '.join((name, *arguments))}\n")
    return {"srun": _srun, "scancel": _scancel, "scontrol": _scontrol}[name](folder, list(arguments))


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))

"""The command as each of the processes that torchrun or srun starts trains the same, and speaks once.

For srun, two processes of this machine get the variables that Slurm sets.
"""

# promise: the command within an outer torchrun or srun trains the same; its signals, deaths, errors

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from job import Job, Recording
from launched import EACH_STEP, EXACT, Curves, assert_same, curves
from outer import run_line, srun

from pipeline.protocol.events import (
    CheckpointSaved,
    Failed,
    Resumed,
    RunClosed,
    SystemMetrics,
    Warned,
)

MLP = Path(__file__).parents[3] / "experiments" / "mlp.yaml"


@pytest.fixture(scope="module")
def expected(launched: Callable[[str], Any]) -> Curves:
    return curves(launched("inprocess").events["fp64"])


@pytest.fixture(scope="module")
def under_torchrun(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The command itself as one of two processes that ``torchrun`` has started."""
    folder = tmp_path_factory.mktemp("torchrun")
    overrides = [
        "parallel.launcher=torchrun",
        "train.precision=fp64",
        "train.epochs=2",
        "tracking.log_model=false",
        EACH_STEP,
    ]
    line = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    line += ["-m", "pipeline", "run", str(MLP), "--no-baseline", *overrides]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    return done, folder


def test_a_run_inside_torchrun_is_the_same(
    under_torchrun: tuple[subprocess.CompletedProcess[str], Path], expected: Curves
) -> None:
    done, folder = under_torchrun

    assert done.returncode == 0, done.stderr
    (run,) = (folder / "runs").iterdir()
    assert_same(curves(Recording(run).events), expected, tolerance=EXACT)


def test_a_run_inside_torchrun_speaks_once(
    under_torchrun: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    done, _ = under_torchrun

    assert done.stderr.count("starting 2 workers") == 1
    assert done.stdout.count("\nReport   ") == 1


def test_a_killed_rank_is_named_although_torchrun_ends_the_driver(cwd: Path) -> None:
    """It sends SIGTERM to the driver within a tenth of a second."""
    line = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m"]
    more = ["--no-baseline", "parallel.cpus_per_worker=1", "model={_target_: lab.Net, fault: killed, rank: 1}"]
    line += [*run_line("parallel.strategy=ddp", "parallel.launcher=torchrun", "parallel.workers=2", *more)[2:]]
    done = subprocess.run(line, cwd=cwd, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1, done.stderr
    assert "error: rank 1 exited without reporting an error: its process was killed or crashed" in done.stderr
    assert "terminated by SIGTERM" not in done.stderr


TRAINING = ["train.precision=fp64", "model={_target_: lab.Sluggish, ms: 20, width: 8}", "train.epochs=40"]
OFTEN = ["--no-baseline", "checkpoint.every_steps=10"]
DDP = ["parallel.strategy=ddp", "parallel.launcher=torchrun", "parallel.workers=2", "parallel.cpus_per_worker=1"]
STEPS = 160


def _copied(project: Path, folder: Path) -> Path:
    """A copy without the runs that other tests have left there."""
    return Path(shutil.copytree(project, folder / "project", ignore=shutil.ignore_patterns("runs", "*.db")))


@pytest.fixture
def cwd(project: Path, tmp_path: Path) -> Path:
    return _copied(project, tmp_path)


@pytest.fixture(scope="module")
def alone(project: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of one process that nobody disturbs."""
    cwd = _copied(project, tmp_path_factory.mktemp("alone"))
    subprocess.run(run_line(*TRAINING, *OFTEN, "model.ms=0"), cwd=cwd, check=True, capture_output=True, timeout=200)
    (folder,) = (cwd / "runs").iterdir()
    return dict(Recording(folder).losses)


def start(cwd: Path, lines: list[list[str]], variables: list[dict[str, str]]) -> Job:
    """Start a rank for each line, with variables of a launcher instead of Slurm's, which this process may have."""
    here = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return Job(cwd).start(*lines, environments=[here | own for own in variables])


def job(cwd: Path, *arguments: str) -> Job:
    """Start both tasks of ``srun --ntasks=2 pipeline run lab.yaml`` on one node; each job has a number of its own."""
    tasks = [srun(rank, 2, job=os.getpid() * 100 + len(list(cwd.parent.iterdir()))) for rank in range(2)]
    return start(cwd, [run_line(*TRAINING, *OFTEN, *DDP, *arguments)] * 2, tasks)


def test_tasks_of_srun_train_what_one_process_does(cwd: Path, alone: dict[int, float]) -> None:
    with job(cwd) as ranks:
        first, second = ranks.ended()
    assert (first.code, second.code) == (0, 0), first.output + second.output
    assert len(alone) == STEPS
    assert dict(ranks.losses) == pytest.approx(alone, rel=0, abs=EXACT)
    assert first.stderr.count("starting 2 workers") == 1
    assert second.stdout == ""
    assert ranks.all_of(SystemMetrics)


@pytest.mark.parametrize(
    "told", [[0], [1], [0, 1]], ids=["the driver", "the other rank", "all processes, as Slurm does"]
)
def test_sigterm_to_a_task_leaves_a_checkpoint_of_a_common_step(
    told: list[int], cwd: Path, alone: dict[int, float]
) -> None:
    with job(cwd) as ranks:
        ranks.wait_for_step(30)
        tasks = [psutil.Process(ranks.processes[rank].pid) for rank in told]
        workers = [each for task in tasks for each in task.children(recursive=True)] if len(told) > 1 else []
        for process in (*tasks, *workers):
            process.send_signal(signal.SIGTERM)
        ends = ranks.ended()
    assert [end.code for end in ends] == [143, 143], ends
    saved = max(event.step for event in ranks.all_of(CheckpointSaved))
    assert saved == ranks.losses[-1][0] < STEPS
    assert [event.status for event in ranks.all_of(RunClosed)] == ["KILLED"]
    resumed = subprocess.run(
        run_line(*TRAINING, *OFTEN, "--resume"), cwd=cwd, capture_output=True, text=True, timeout=200, check=False
    )
    assert resumed.returncode == 0, resumed.stderr
    assert [event.step for event in ranks.all_of(Resumed)] == [saved]
    assert dict(ranks.losses) == pytest.approx(alone, rel=0, abs=EXACT)


def test_killed_task_is_named_and_the_other_one_ends(cwd: Path) -> None:
    with job(cwd, "parallel.max_failures=3") as ranks:
        ranks.wait_for_step(20)
        ranks.processes[1].kill()
        ended, _ = ranks.ended()
    assert ended.code == 1, ended.output
    assert "rank 1 exited without reporting an error: its process was killed or crashed" in ended.stderr
    assert "continue it with --resume " in ended.stderr
    assert "Traceback" not in ended.output
    assert not any("resuming" in event.message for event in ranks.all_of(Warned))


def test_killed_driver_ends_the_other_task(cwd: Path) -> None:
    with job(cwd) as ranks:
        ranks.wait_for_step(20)
        ranks.processes[0].kill()
        _, ended = ranks.ended()
    assert ended.code == 1, ended.output
    assert f"rank 1 on {os.uname().nodename} lost the connection to rank 0, which drives the run" in ended.stderr
    assert "Traceback" not in ended.output


def test_error_of_another_task_is_that_of_the_run(cwd: Path) -> None:
    with job(cwd, "model={_target_: lab.Net, fault: raises, rank: 1}") as ranks:
        first, second = ranks.ended()
    assert (first.code, second.code) == (1, 1), first.output + second.output
    assert f"rank 1 on {os.uname().nodename}: ZeroDivisionError: the model's own mistake" in first.stderr
    assert second.stderr.count("Traceback") == 1  # the whole: its terminal is its log
    assert next(event.origin for event in ranks.all_of(Failed)) == "rank"


def test_driver_waits_for_missing_tasks_only_so_long(cwd: Path) -> None:
    line = run_line(*TRAINING, *OFTEN, *DDP, "parallel.start_timeout_s=3")
    with start(cwd, [line], [srun(0, 2)]) as ranks:
        (ended,) = ranks.ended()
    assert ended.code == 3, ended.output
    assert "srun started 2 processes. 1 of them did not reach rank 0" in ended.stderr
    assert not (cwd / "runs").exists()


def test_mistakes_are_told_once(cwd: Path) -> None:
    with job(cwd, "parallel.workers=1") as ranks:
        first, second = ranks.ended()
    assert (first.code, second.code) == (2, 2)
    assert "parallel.workers: is 1, but srun started 2 processes. Make the numbers equal." in first.stderr
    assert second.output == ""
    with job(cwd, "parallel.launcher=inprocess") as ranks:
        first, second = ranks.ended()
    assert (first.code, second.code) == (2, 2)
    assert "is inprocess, but srun started this process. Add parallel.launcher=torchrun" in first.stderr
    assert second.output == ""


def test_plan_is_that_of_all_tasks_and_printed_once(cwd: Path) -> None:
    with job(cwd, "--dry-run") as ranks:
        first, second = ranks.ended()
    assert (first.code, second.code) == (0, 0), first.output + second.output
    assert "title: ddp, 2 workers" in first.stdout
    assert second.output == ""


def test_a_single_task_starts_its_workers_itself(cwd: Path) -> None:
    with start(cwd, [run_line("--no-baseline", *DDP)], [srun(0, 1)]) as ranks:
        (ended,) = ranks.ended()
    assert ended.code == 0, ended.output
    assert "ddp, 2 workers: done, 8 steps" in ended.stderr

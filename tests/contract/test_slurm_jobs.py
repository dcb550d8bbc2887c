"""Scripts of submitted jobs, read by shellcheck and executed by bash."""

# promise: a Slurm job near its time limit saves its last step; a cancelled one stays cancelled
# promise: `submit`, the script for Slurm

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from slurm import Slurm
from waiting import eventually

from pipeline.commands.submit import slurm_script
from pipeline.commands.submit.ray_job import entrypoint
from pipeline.commands.submit.request import Request
from pipeline.config.load import load
from pipeline.config.schema import Experiment

SHELLCHECK = Path(sys.executable).with_name("shellcheck")
PATH = {"PATH": os.environ["PATH"]}
TWO = ("parallel.workers=2", "parallel.strategy=ddp", "parallel.cpus_per_worker=3")


@pytest.fixture(autouse=True)
def in_project(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)


def request(*overrides: str, file: str = "lab.yaml", **more: Any) -> Request:
    everything = (*TWO, *overrides)
    return Request(file=load(file, everything), overrides=everything, **more)


AWKWARD = (
    "name=it-s",
    'tracking.experiment="it\'s $HOME; a `b` \\\\ c"',
    "benchmark.configurations=[{strategy: ddp}]",
)


def test_entrypoint_makes_the_same_experiment_there(tmp_path: Path) -> None:
    made = request(*AWKWARD, options=("--no-baseline", "--resume=latest"))
    words = words_of(entrypoint(made, folder=Path()), tmp_path)
    assert words[:4] == ["-m", "pipeline", "run", "lab.yaml"]
    assert words[-2:] == ["--no-baseline", "--resume=latest"]
    there = load("lab.yaml", words[4:-2]).experiment
    assert there.tracking.experiment == "it's $HOME; a `b` \\ c"
    assert there.tracking.directory == "/home/me/pipeline-runs/it-s"
    assert without_place(there) == without_place(made.file.experiment)
    assert (there.parallel.launcher, there.parallel.address) == ("ray", "auto")


def without_place(experiment: Experiment) -> Experiment:
    parallel = experiment.parallel.model_copy(update={"launcher": "", "address": None})
    tracking = experiment.tracking.model_copy(update={"directory": ""})
    return experiment.model_copy(update={"parallel": parallel, "tracking": tracking})


def words_of(line: str, folder: Path) -> list[str]:
    """The arguments that python gets from a shell."""
    script(
        folder / "bin" / "python", f'exec {sys.executable} -c "import json, sys; print(json.dumps(sys.argv[1:]))" "$@"'
    )
    path = f"{folder / 'bin'}:{PATH['PATH']}"
    done = subprocess.run(["sh", "-c", line], env={"PATH": path, "HOME": "/home/me"}, capture_output=True, check=True)
    return list(json.loads(done.stdout))


def script(path: Path, *lines: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(("#!/bin/bash", *lines, "")))
    path.chmod(0o755)
    return path


def test_variable_that_was_read_here_must_be_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TEAM", "vision")
    reading = "tracking.experiment=${oc.env:TEAM,all}"
    line = request(reading).command()
    done = subprocess.run(["sh", "-c", line], env=PATH, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "TEAM: set on the machine that sent this job, but not here" in done.stderr
    assert words_of(request(reading, environment=("TEAM",)).command(), tmp_path)[1:3] == ["pipeline", "run"]


@pytest.mark.parametrize("overrides", [(), ("parallel.device=cuda",), AWKWARD])
@pytest.mark.parametrize(
    ("options", "launcher"), [((), "ray"), (("--resume=latest",), "ray"), ((), "torchrun"), ((), "srun")]
)
def test_sbatch_script_is_sound(
    overrides: tuple[str, ...], options: tuple[str, ...], launcher: slurm_script.SlurmLauncher, tmp_path: Path
) -> None:
    path = tmp_path / "job.sbatch"
    path.write_text(slurm_script.format_script(request(*overrides, options=options), launcher=launcher))
    for check in (["bash", "-n"], [SHELLCHECK, "--norc", "--severity=warning"]):
        done = subprocess.run([*check, path], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


PYTHON = """
case "$*" in
  *scripts*) printenv RAY_AUTH_TOKEN >> "$SECRETS"; exec sleep 60 ;;
  -\\ *) until [[ -e $SECRETS ]] && (($(wc -l < "$SECRETS") >= 2)); do sleep 0.05; done; exit "${JOINED:-0}" ;;
esac
echo "$@" >> "$CALLS"
for word; do case $word in tracking.directory=*) runs=${word#*=} ;; esac; done
mkdir -p "$runs/one" && echo event > "$runs/one/events.jsonl"
case "$*" in *--resume*) exit 0 ;; esac
case "$*" in *torch.distributed.run*) code=1 ;; *) code=143 ;; esac
trap 'sleep 0.2; touch "$runs/one/checkpoint"; exit $code' TERM
while true; do sleep 0.05; done
"""
"""Stands in for python: Ray's processes do nothing, a run trains until SIGTERM and ends once it is resumed."""


class Job(Slurm):
    """A job of Slurm's stand-in, whose run only waits for signals."""

    def __init__(self, folder: Path, *, launcher: slurm_script.SlurmLauncher = "ray") -> None:
        super().__init__(folder, job=4711, cwd=folder)
        self.calls, self.secrets = folder / "calls", folder / "secrets"
        self.environment |= {
            "PYTHON": str(script(folder / "bin" / "fake-python", PYTHON)),
            "CALLS": str(self.calls),
            "SECRETS": str(self.secrets),
        }
        self.script = folder / "job.sbatch"
        self.script.write_text(slurm_script.format_script(request(), launcher=launcher))
        self.run = folder / "runs" / "slurm-4711" / "one"

    def await_training(self) -> None:
        eventually((self.run / "events.jsonl").exists)


@pytest.mark.parametrize("launcher", ["ray", "torchrun", "srun"])
def test_job_near_its_time_limit_saves_a_checkpoint_is_requeued_once_and_resumed(
    launcher: slurm_script.SlurmLauncher, tmp_path: Path
) -> None:
    job = Job(tmp_path, launcher=launcher)
    with job.start(job.script) as first:
        job.await_training()
        job.near_time_limit(first, job.script)
        output, _ = first.communicate(timeout=30)
    assert first.returncode == (1 if launcher == "torchrun" else 143), output
    assert (job.run / "checkpoint").exists(), "the run was killed"
    assert job.requeued == ["4711"]
    if launcher == "ray":
        assert job.commands[-2].endswith("--nodes=2 --ntasks=2 rm -rf /tmp/ray-4711")
    with job.start(job.script) as second:
        output, _ = second.communicate(timeout=30)
    assert second.returncode == 0, output
    assert job.requeued == ["4711"], "a run that has finished is not requeued"
    started, resumed = job.calls.read_text().splitlines()
    assert "--resume" not in started
    assert "--resume" in resumed
    assert ("parallel.address=" in started) == (launcher == "ray")
    assert f"parallel.launcher={'ray' if launcher == 'ray' else 'torchrun'}" in started
    assert started.startswith("-m torch.distributed.run --nnodes=2 " if launcher == "torchrun" else "-m pipeline run ")


@pytest.mark.parametrize("launcher", ["ray", "torchrun", "srun"])
def test_cancelled_job_stays_cancelled(launcher: slurm_script.SlurmLauncher, tmp_path: Path) -> None:
    job = Job(tmp_path, launcher=launcher)
    with job.start(job.script) as batch:
        job.await_training()
        subprocess.run([tmp_path / "bin" / "scancel", "--batch", "--signal=TERM", "4711"], check=True)
        output, _ = batch.communicate(timeout=30)
    assert batch.returncode == (1 if launcher == "torchrun" else 143), output
    assert (job.run / "checkpoint").exists()
    shutil.rmtree(job.run)
    with job.start(job.script) as batch:
        job.await_training()
        job.cancel()
        output, _ = batch.communicate(timeout=30)
    assert batch.returncode != 0, output
    assert job.requeued == []


def test_ray_is_started_once_on_each_node_with_a_token_that_is_nowhere_to_be_seen(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with job.start(job.script, JOINED="7") as batch:
        output, _ = batch.communicate(timeout=30)
    assert batch.returncode == 7, output
    assert not job.calls.exists(), "nothing runs on a cluster that is not whole"
    started = [line for line in job.commands if "ray.scripts" in line]
    head, others = sorted(started, key=lambda line: "--head" not in line)
    assert "--nodelist=" in head
    assert "--head" in head
    assert "--exclude=" in others
    assert "--address=" in others
    (token,) = set(job.secrets.read_text().split())
    assert len(token) == 64
    assert not any(token in line for line in (*job.commands, output))

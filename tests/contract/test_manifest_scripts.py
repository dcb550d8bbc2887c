"""Scripts of submitted jobs, read by shellcheck and executed by bash."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from waiting import eventually

from pipeline.commands.submit import manifests
from pipeline.commands.submit.request import Request
from pipeline.config.load import load
from pipeline.config.schema import Experiment

SHELLCHECK = Path(sys.executable).with_name("shellcheck")
PATH = {"PATH": os.environ["PATH"]}
TWO = ("parallel.workers=2", "parallel.strategy=ddp", "parallel.cpus_per_worker=3")
PODS = manifests.Pods(image="registry.example/team/project:1", claim="runs")


@pytest.fixture(autouse=True)
def in_project(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)


def request(*overrides: str, file: str = "lab.yaml", **more: Any) -> Request:
    everything = (*TWO, *overrides)
    return Request(file=load(file, everything), overrides=everything, **more)


def documents(made: Request, pods: manifests.Pods = PODS) -> tuple[dict[str, Any], dict[str, Any]]:
    """ConfigMap and RayJob."""
    config, job = yaml.safe_load_all(manifests.kuberay_job(made, pods))
    return config, job


AWKWARD = (
    "name=it-s",
    'tracking.experiment="it\'s $HOME; a `b` \\\\ c"',
    "compare=[{strategy: single}, {strategy: ddp}]",
)


def test_entrypoint_and_file_make_the_same_experiment_there(tmp_path: Path) -> None:
    made = request(*AWKWARD, options=("--no-baseline", "--resume=latest"))
    config, job = documents(made)
    path = tmp_path / "experiment.yaml"
    path.write_text(config["data"]["experiment.yaml"])
    assert path.read_text().rstrip() == Path("lab.yaml").read_text().rstrip()
    words = words_of(job["spec"]["entrypoint"], tmp_path)
    assert words[:4] == ["-m", "pipeline", "run", "/etc/pipeline/experiment.yaml"]
    assert words[-2:] == ["--no-baseline", "--resume=latest"]
    there = load(path, words[4:-2]).experiment
    assert there.tracking.experiment == "it's $HOME; a `b` \\ c"
    assert without_place(there) == without_place(made.file.experiment)
    assert (there.parallel.launcher, there.parallel.address, there.parallel.ship_code) == ("ray", "auto", False)


def without_place(experiment: Experiment) -> Experiment:
    parallel = experiment.parallel.model_copy(update={"launcher": "", "address": None, "ship_code": True})
    tracking = experiment.tracking.model_copy(update={"directory": ""})
    return experiment.model_copy(update={"parallel": parallel, "tracking": tracking})


def words_of(entrypoint: str, folder: Path) -> list[str]:
    """The arguments that python gets from a shell."""
    script(
        folder / "bin" / "python", f'exec {sys.executable} -c "import json, sys; print(json.dumps(sys.argv[1:]))" "$@"'
    )
    path = f"{folder / 'bin'}:{PATH['PATH']}"
    done = subprocess.run(["sh", "-c", entrypoint], env={"PATH": path, "HOME": "/"}, capture_output=True, check=True)
    return list(json.loads(done.stdout))


def script(path: Path, *lines: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(("#!/bin/bash", *lines, "")))
    path.chmod(0o755)
    return path


def test_variable_that_was_read_here_must_be_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TEAM", "vision")
    reading = "tracking.experiment=${oc.env:TEAM,all}"
    _, job = documents(request(reading))
    done = subprocess.run(
        ["sh", "-c", job["spec"]["entrypoint"]], env=PATH, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "TEAM: set where this job was sent from, but not here" in done.stderr
    _, job = documents(request(reading, environment=("TEAM",)))
    assert words_of(job["spec"]["entrypoint"], tmp_path)[1:3] == ["pipeline", "run"]


@pytest.mark.parametrize("overrides", [(), ("parallel.device=cuda",), AWKWARD])
@pytest.mark.parametrize(
    ("options", "launcher"), [((), "ray"), (("--resume=latest",), "ray"), ((), "torchrun"), ((), "srun")]
)
def test_sbatch_script_is_sound(
    overrides: tuple[str, ...], options: tuple[str, ...], launcher: manifests.SlurmLauncher, tmp_path: Path
) -> None:
    path = tmp_path / "job.sbatch"
    path.write_text(manifests.slurm_script(request(*overrides, options=options), launcher=launcher))
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
trap 'sleep 0.2; exit 143' TERM
while true; do sleep 0.05; done
"""
"""Stands in for python: Ray's processes do nothing, a run trains until SIGTERM and ends once it is resumed."""


class Allocation:
    """Stands in for Slurm: its commands, on this machine."""

    def __init__(self, folder: Path, *, launcher: manifests.SlurmLauncher = "ray") -> None:
        self.calls, self.requeued = folder / "calls", folder / "requeued"
        drop = 'while [[ $1 == --* ]]; do shift; done; exec "$@"'
        script(folder / "bin" / "srun", 'echo "$@" >> "$STEPS"', drop)
        script(
            folder / "bin" / "scontrol",
            'case $1 in show) hostname; echo other ;; requeue) echo "$2" >> "$REQUEUED" ;; esac',
        )
        self.steps, self.secrets = folder / "steps", folder / "secrets"
        self.environment = {
            **os.environ,
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "PYTHON": str(script(folder / "bin" / "fake-python", PYTHON)),
            "CALLS": str(self.calls),
            "STEPS": str(self.steps),
            "SECRETS": str(self.secrets),
            "REQUEUED": str(self.requeued),
            "SLURM_JOB_ID": "4711",
            "SLURM_SUBMIT_DIR": str(folder),
            "SLURM_JOB_NODELIST": "here,other",
            "SLURM_CPUS_PER_TASK": "1",
        }
        self.job = folder / "job.sbatch"
        self.job.write_text(manifests.slurm_script(request(), launcher=launcher))

    @contextmanager
    def start(self, **more: str) -> Iterator[subprocess.Popen[str]]:
        environment = {**self.environment, **more}
        line = ["bash", self.job]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(line, env=environment, text=True, process_group=0, **streams) as job:
            try:
                yield job
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(job.pid, signal.SIGKILL)


@pytest.mark.parametrize("launcher", ["ray", "torchrun", "srun"])
def test_sigterm_reaches_the_run_which_is_requeued_and_resumed(
    launcher: manifests.SlurmLauncher, tmp_path: Path
) -> None:
    allocation = Allocation(tmp_path, launcher=launcher)
    with allocation.start() as first:
        eventually(lambda: (tmp_path / "runs" / "slurm-4711" / "one" / "events.jsonl").exists())
        first.send_signal(signal.SIGTERM)
        output, _ = first.communicate(timeout=30)
    assert first.returncode == 143, output
    assert allocation.requeued.read_text() == "4711\n"
    with allocation.start() as second:
        output, _ = second.communicate(timeout=30)
    assert second.returncode == 0, output
    assert allocation.requeued.read_text() == "4711\n", "a run that has finished is not requeued"
    begun, resumed = allocation.calls.read_text().splitlines()
    assert "--resume" not in begun
    assert "--resume" in resumed
    assert ("parallel.address=" in begun) == (launcher == "ray")
    assert f"parallel.launcher={'ray' if launcher == 'ray' else 'torchrun'}" in begun
    assert begun.startswith("-m torch.distributed.run --nnodes=2 " if launcher == "torchrun" else "-m pipeline run ")


def test_ray_is_started_once_on_each_node_with_a_token_that_is_nowhere_to_be_seen(tmp_path: Path) -> None:
    allocation = Allocation(tmp_path)
    with allocation.start(JOINED="7") as job:
        output, _ = job.communicate(timeout=30)
    assert job.returncode == 7, output
    assert not allocation.calls.exists(), "nothing runs on a cluster that is not whole"
    head, others = sorted(allocation.steps.read_text().splitlines(), key=lambda line: "--head" not in line)
    assert "--nodelist=" in head
    assert "--head" in head
    assert "--exclude=" in others
    assert "--address=" in others
    (token,) = set(allocation.secrets.read_text().split())
    assert len(token) == 64
    assert not any(token in line for line in (head, others, output))

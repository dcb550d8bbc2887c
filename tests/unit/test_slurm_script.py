"""The script for Slurm requests what the workers need."""

# promise: `submit`, the script for Slurm

from pathlib import Path
from typing import Any

import pytest

from pipeline.commands.submit import slurm_script
from pipeline.commands.submit.request import Request
from pipeline.config.load import load
from pipeline.errors import ExperimentError, UsageError

TWO = ("parallel.workers=2", "parallel.strategy=ddp", "parallel.cpus_per_worker=3")


@pytest.fixture(autouse=True)
def in_project(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)


def request(*overrides: str, file: str = "lab.yaml", **more: Any) -> Request:
    everything = (*TWO, *overrides)
    return Request(file=load(file, everything), overrides=everything, **more)


@pytest.mark.parametrize(("nodes", "wanted"), [(None, (2, 3, 1)), (1, (1, 6, 2))])
def test_allocation_has_room_for_the_workers(nodes: int | None, wanted: tuple[int, int, int]) -> None:
    text = slurm_script.format_script(request("parallel.device=cuda"), nodes=nodes)
    for option, value in zip(("nodes", "cpus-per-task", "gpus-per-node"), wanted, strict=True):
        assert f"#SBATCH --{option}={value}\n" in text


@pytest.mark.parametrize(
    ("launcher", "nodes", "wanted"),
    [("srun", 1, (1, 2, 3, 2)), ("srun", 2, (2, 1, 3, 1)), ("torchrun", 1, (1, 1, 6, 2)), ("ray", 1, (1, 1, 6, 2))],
)
def test_tasks_are_what_the_launcher_starts(
    launcher: slurm_script.SlurmLauncher, nodes: int, wanted: tuple[int, ...]
) -> None:
    text = slurm_script.format_script(request("parallel.device=cuda"), nodes=nodes, launcher=launcher)
    options = ("nodes", "ntasks-per-node", "cpus-per-task", "gpus-per-node")
    for option, value in zip(options, wanted, strict=True):
        assert f"#SBATCH --{option}={value}\n" in text
    assert "#SBATCH --requeue\n" in text
    assert "#SBATCH --signal=B:USR1@" in text
    assert ("ray.scripts" in text) == (launcher == "ray")
    assert ("torch.distributed.run" in text) == (launcher == "torchrun")


def test_an_allocation_needs_the_cores_of_a_worker() -> None:
    with pytest.raises(ExperimentError, match=r"parallel\.cpus_per_worker: missing"):
        slurm_script.format_script(request("parallel.cpus_per_worker=null"))


def test_workers_must_divide_among_nodes() -> None:
    with pytest.raises(UsageError, match="--nodes 2: srun starts the same number of workers on each node"):
        slurm_script.format_script(request("parallel.workers=3"), nodes=2, launcher="srun")


def test_slurm_refuses_what_it_can_not_do() -> None:
    with pytest.raises(UsageError, match="more nodes than workers"):
        slurm_script.format_script(request(), nodes=3)
    with pytest.raises(UsageError, match="Remove the option"):
        slurm_script.format_script(request(environment=("TOKEN",)))


def test_a_job_needs_the_variable_that_its_tracking_address_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://there:5000")
    assert "MLFLOW_TRACKING_URI" not in request("tracking.uri=http://here:5000").variables
    without = Path("without.yaml")
    without.write_text("\n".join(line for line in Path("lab.yaml").read_text().splitlines() if "uri" not in line))
    asked = Request(file=load("without.yaml"))
    assert asked.variables == ("MLFLOW_TRACKING_URI",)
    assert ': "${MLFLOW_TRACKING_URI?set on the machine' in asked.command()

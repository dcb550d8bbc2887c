"""Manifests for clusters that aren't here: against their schemas, and in a shell with stand-ins for what is missing."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from pipeline.commands.submit import manifests
from pipeline.commands.submit.request import Request
from pipeline.config.load import load
from pipeline.errors import ExperimentError, UsageError

RAYJOB = json.loads(Path(__file__).with_name("rayjob.schema.json").read_text())
KUBERNETES = "1.34"
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


def pods_of(job: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    return {"head": cluster["headGroupSpec"]["template"]["spec"], "workers": workers["template"]["spec"]}


@pytest.mark.parametrize(
    ("overrides", "pods"),
    [
        ((), PODS),
        (("parallel.device=cuda",), PODS),
        (("checkpoint.directory=s3://bucket/folder",), manifests.Pods(image="image", memory="500M")),
    ],
)
def test_rayjob_is_what_kuberay_and_kubernetes_accept(overrides: tuple[str, ...], pods: manifests.Pods) -> None:
    config, job = documents(request(*overrides, environment=("AWS_SECRET_ACCESS_KEY",)), pods)
    jsonschema.validate(job, RAYJOB)
    kubernetes_validate.validate(config, KUBERNETES, strict=True)
    for name, spec in pods_of(job).items():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_schemas_refuse_what_is_misspelt() -> None:
    _, job = documents(request())
    job["spec"]["rayClusterSpec"]["workerGroups"] = []
    with pytest.raises(jsonschema.ValidationError, match="workerGroups"):
        jsonschema.validate(job, RAYJOB)
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "x"},
        "spec": {"containers": [{"name": "x", "imge": "y"}]},
    }
    with pytest.raises(kubernetes_validate.ValidationError, match="imge"):
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_pods_get_what_the_workers_ask_for() -> None:
    made = request("parallel.device=cuda", environment=("TOKEN",))
    _, job = documents(made, manifests.Pods(image="image", claim="claim", memory="12Gi", secret="keys"))
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    (worker,) = pods_of(job)["workers"]["containers"]
    (head,) = pods_of(job)["head"]["containers"]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == 2
    assert worker["resources"]["limits"] == {"cpu": "3", "memory": "12Gi", "nvidia.com/gpu": "1"}
    assert worker["resources"]["requests"] == worker["resources"]["limits"]
    assert "nvidia.com/gpu" not in head["resources"]["limits"]
    for container in (worker, head):
        assert {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "TOKEN"}}} in container["env"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
    for spec in pods_of(job).values():
        assert spec["securityContext"]["runAsNonRoot"] is True
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert volumes["shared-memory"]["emptyDir"]["medium"] == "Memory"
        assert volumes["runs"]["persistentVolumeClaim"] == {"claimName": "claim"}


def test_no_secret_is_in_a_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "planted-4711")
    assert "planted-4711" not in manifests.kuberay_job(request(environment=("TOKEN",)), PODS)


@pytest.mark.parametrize(
    ("overrides", "pods", "said"),
    [
        (("parallel.cpus_per_worker=null",), PODS, "parallel.cpus_per_worker: missing"),
        ((), manifests.Pods(image="image"), "checkpoint.directory: no storage that all pods share"),
    ],
)
def test_what_pods_need_is_asked_for(overrides: tuple[str, ...], pods: manifests.Pods, said: str) -> None:
    with pytest.raises(ExperimentError, match=said):
        manifests.kuberay_job(request(*overrides), pods)


@pytest.mark.parametrize("wrong", [{"memory": "8 GB"}, {"claim": "Mine"}, {"secret": "a_b"}])
def test_names_that_kubernetes_refuses_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        manifests.kuberay_job(request(), manifests.Pods(**{"image": "image", "claim": "runs", **wrong}))


@pytest.mark.parametrize(("nodes", "wanted"), [(None, (2, 3, 1)), (1, (1, 6, 2))])
def test_allocation_has_room_for_the_workers(nodes: int | None, wanted: tuple[int, int, int]) -> None:
    text = manifests.slurm_script(request("parallel.device=cuda"), nodes=nodes)
    for option, value in zip(("nodes", "cpus-per-task", "gpus-per-node"), wanted, strict=True):
        assert f"#SBATCH --{option}={value}\n" in text


@pytest.mark.parametrize(
    ("launcher", "nodes", "wanted"),
    [("srun", 1, (1, 2, 3, 2)), ("srun", 2, (2, 1, 3, 1)), ("torchrun", 1, (1, 1, 6, 2)), ("ray", 1, (1, 1, 6, 2))],
)
def test_tasks_are_what_the_launcher_starts(
    launcher: manifests.SlurmLauncher, nodes: int, wanted: tuple[int, ...]
) -> None:
    text = manifests.slurm_script(request("parallel.device=cuda"), nodes=nodes, launcher=launcher)
    options = ("nodes", "ntasks-per-node", "cpus-per-task", "gpus-per-node")
    for option, value in zip(options, wanted, strict=True):
        assert f"#SBATCH --{option}={value}\n" in text
    assert "#SBATCH --requeue\n" in text
    assert "#SBATCH --signal=B:USR1@" in text
    assert ("ray.scripts" in text) == (launcher == "ray")
    assert ("torch.distributed.run" in text) == (launcher == "torchrun")


def test_workers_must_divide_among_nodes() -> None:
    with pytest.raises(UsageError, match="--nodes 2: srun starts the same number of workers on each node"):
        manifests.slurm_script(request("parallel.workers=3"), nodes=2, launcher="srun")


def test_slurm_refuses_what_it_can_not_do() -> None:
    with pytest.raises(UsageError, match="more nodes than workers"):
        manifests.slurm_script(request(), nodes=3)
    with pytest.raises(UsageError, match="Remove the option"):
        manifests.slurm_script(request(environment=("TOKEN",)))


def test_a_job_needs_the_variable_that_its_tracking_address_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://there:5000")
    assert "MLFLOW_TRACKING_URI" not in request("tracking.uri=http://here:5000").variables
    without = Path("without.yaml")
    without.write_text("\n".join(line for line in Path("lab.yaml").read_text().splitlines() if "uri" not in line))
    asked = Request(file=load("without.yaml"))
    assert asked.variables == ("MLFLOW_TRACKING_URI",)
    assert ': "${MLFLOW_TRACKING_URI?set on the machine' in asked.command()

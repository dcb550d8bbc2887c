"""A cluster's autoscaler is asked for nodes that are lacking, where there is one."""

# promise: an autoscaler is asked for nodes, at the start; Ray's own

import json

import pytest
import toys

from pipeline.errors import ResourceError
from pipeline.launch.cluster import autoscaling, placement, ray_internals
from pipeline.launch.cluster.autoscaling import NodeRequest
from pipeline.plan.plan import Plan, make_plan
from pipeline.plan.resources import Resources

EMPTY = Resources(cpus=0, memory_mb=0, node="Ray cluster at head:6379", is_autoscaled=True)
HEAD = Resources(cpus=4, memory_mb=4096, node="Ray cluster at head:6379", is_autoscaled=True)
GPUS = Resources(cpus=8, memory_mb=4096, gpus=("GPU",) * 2, node="Ray cluster at head:6379", is_autoscaled=True)
TWO = {"strategy": "ddp", "launcher": "ray", "workers": 2}


@pytest.mark.parametrize(
    ("is_second", "types", "labels", "is_there"),
    [
        (False, None, {}, False),
        (False, {"a1": "node_a1"}, {}, False),
        (False, {"10.0.0.1": "headgroup"}, {}, True),
        (True, None, {}, False),
        (True, None, {"ray.io/node-group": "headgroup"}, True),
    ],
    ids=["no report yet", "reports only", "v1", "v2 reports only", "v2"],
)
def test_an_autoscaler_has_types_of_nodes(is_second, types, labels, is_there, monkeypatch) -> None:
    report = json.dumps({"autoscaler_report": {"node_type_mapping": types}}) if types else None
    monkeypatch.setattr("ray.autoscaler.v2.utils.is_autoscaler_v2", lambda **_: is_second)
    monkeypatch.setattr(ray_internals, "_internal_kv_get", lambda _: report)
    monkeypatch.setattr(ray_internals.ray, "nodes", lambda: [{"Labels": labels}])
    assert ray_internals.has_autoscaler() == is_there


@pytest.mark.parametrize(
    ("start", "is_there"),
    [
        ("ulimit -n 65536; ray start --head  --block  --no-monitor  --num-cpus=4 ", True),
        ("ulimit -n 65536; ray start --head  --block  --num-cpus=4 ", False),
        ("ulimit -n 65536; ray start  --address=head:6379  --block ", True),  # unknown in a worker's pod
    ],
)
def test_kuberay_names_types_of_nodes_without_an_autoscaler_too(start, is_there, monkeypatch) -> None:
    monkeypatch.setenv("KUBERAY_GEN_RAY_START_CMD", start)
    monkeypatch.setattr("ray.autoscaler.v2.utils.is_autoscaler_v2", lambda **_: True)
    monkeypatch.setattr(ray_internals.ray, "nodes", lambda: [{"Labels": {"ray.io/node-group": "headgroup"}}])
    assert ray_internals.has_autoscaler() == is_there


def plan(there: Resources, **parallel: object) -> Plan:
    return make_plan(toys.experiment(parallel={**TWO, **parallel}), there, allowed=("toys",), with_baseline=True)


def test_what_does_not_fit_is_planned_where_nodes_can_be_added() -> None:
    made = plan(EMPTY, device="cpu", cpus_per_worker=4)
    assert (made.main.workers, made.main.cpus_per_worker) == (2, 4)
    assert "Room for 0 of 2 workers is free. The cluster's autoscaler may add nodes." in made.notes
    assert "reference" not in [trial.role for trial in made.measured]  # no node may have the cores of both
    assert plan(EMPTY, device="cuda", strategy="dp", workers=1).main.devices_per_worker == 1
    assert plan(GPUS, workers=4).main.device == "cuda"
    assert plan(HEAD, workers=[1, 9], cpus_per_worker=4).main.workers == 1
    assert not [note for note in plan(HEAD).notes if "room" in note]


def test_nodes_that_may_have_gpus_or_not_need_a_device() -> None:
    with pytest.raises(ResourceError) as error:
        plan(HEAD, cpus_per_worker=4)
    assert str(error.value) == (
        "parallel.device: auto can't be resolved. 2 workers need 8 cores, and Ray cluster at head:6379 has 4 cores, "
        "4 GiB, no GPU. Its autoscaler can add nodes, but whether these have GPUs is unknown. Set device to cpu or "
        "cuda."
    )


class Group:
    """A placement group that has room once ``is_met``."""

    is_met = False

    def wait(self, timeout_s: float) -> bool:
        assert timeout_s == 0
        return self.is_met


class Ray:
    """Placement groups as Ray has them."""

    def __init__(self) -> None:
        self.made: list[tuple[list[dict[str, float]], str]] = []
        self.groups: list[Group] = []

    def create(self, bundles: list[dict[str, float]], *, strategy: str) -> Group:
        self.made.append((bundles, strategy))
        self.groups.append(Group())
        return self.groups[-1]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    ray = Ray()
    monkeypatch.setattr(autoscaling, "placement_group", ray.create)
    monkeypatch.setattr(autoscaling, "remove_placement_group", ray.groups.remove)
    return ray


def test_a_request_stands_until_there_is_room(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    trial, request = toys.trial(parallel={"placement": "spread"}), NodeRequest()
    assert [request.make(trial, workers=2) for _ in range(2)] == [True, False]
    assert ray.made == [([{"CPU": 1}] * 2, "SPREAD")]

    ray.groups[0].is_met = True
    assert not request.make(trial, workers=2)
    assert (len(ray.made), ray.groups) == (1, [])  # the room is free for the workers
    monkeypatch.setattr(autoscaling, "_REPEAT_S", 0)
    assert not request.make(trial, workers=2)
    assert (len(ray.made), len(ray.groups)) == (2, 1)  # there was none: it was on a node that can't have workers

    assert request.make(trial, workers=1)
    assert len(ray.groups) == 1
    request.withdraw()
    request.withdraw()
    assert ray.groups == []
    assert request.make(trial, workers=1)


def test_workers_wait_for_nodes_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = toys.trial(parallel={**TWO, "start_timeout_s": 0.1}).model_copy(update={"workers": 2})
    asked: list[int] = []
    monkeypatch.setattr(placement, "_POLL_S", 0.01)
    monkeypatch.setattr(placement.ray, "cluster_resources", dict)
    monkeypatch.setattr(placement, "free", lambda *_: len(asked))
    placement.await_capacity(trial, nodes=list, warn=asked.append, ask=lambda: asked.append(1))
    assert len(asked) == 2

    monkeypatch.setattr(placement, "free", lambda *_: 0)
    with pytest.raises(ResourceError, match=r"Room for 0 workers was free within parallel\.start_timeout_s \(0\.1 s\)"):
        placement.await_capacity(trial, nodes=list, warn=print, ask=lambda: None)
    with pytest.raises(ResourceError, match="Its nodes have room for 0 workers"):
        placement.await_capacity(trial, nodes=list, warn=print)

"""A run on a cluster that starts with a head without cores: Ray's own autoscaler, with its fake provider, adds nodes.

The added nodes are processes on the head's machine. Both versions of the autoscaler run here.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes import Nodes
from projects import project, run
from ray.autoscaler._private.monitor import BASE_READONLY_CONFIG

from pipeline.protocol.events import Started, Warned

pytestmark = pytest.mark.timeout(600)

HEAD_ID, HEAD, MOST_NODES = "f" * 51 + "00000", "ray.head.default", 2
PROVIDER = {
    "type": "external",  # as "fake_multinode", whose defaults Ray's package lacks
    "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
    "disable_launch_config_check": True,
    "disable_node_updaters": True,
    "launch_multiple": True,
    "head_node_id": HEAD_ID,
}
TYPES = {
    HEAD: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
    "worker": {
        "resources": {"CPU": 1, "object_store_memory": 10**8}, "node_config": {}, "max_workers": MOST_NODES,
    },
}  # fmt: skip
SECOND = {"RAY_enable_autoscaler_v2": "1", "RAY_CLOUD_INSTANCE_ID": HEAD_ID, "RAY_NODE_TYPE_NAME": HEAD}
"""What ``ray up`` sets for the second version."""
DDP = ["parallel.strategy=ddp", "parallel.device=cpu", "parallel.cpus_per_worker=1", "checkpoint.every_steps=5"]
ASKED = "asked the cluster's autoscaler for nodes for {} with 1 CPU each"


@pytest.fixture(params=[{}, SECOND], ids=["v1", "v2"])
def nodes(request: pytest.FixtureRequest) -> Iterator[Nodes]:
    with Nodes(1, started=False) as nodes:
        config = nodes.folder / "autoscaler.json"
        provider = {**PROVIDER, "gcs_address": nodes.address}
        kinds = {"available_node_types": TYPES, "head_node_type": HEAD, "max_workers": MOST_NODES}
        config.write_text(
            json.dumps({**BASE_READONLY_CONFIG, **kinds, "provider": provider, "idle_timeout_minutes": 5})
        )
        fake = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
        env = {**fake, "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID, **request.param}
        nodes.start(0, cpus=0, env=env, options=[f"--autoscaling-config={config}"])
        nodes.await_nodes(1)
        yield nodes


def test_nodes_are_asked_for_at_the_start_and_to_grow(nodes: Nodes) -> None:
    cwd = project(nodes.storage(0) / "project", tracked=True)
    planned = run(nodes, cwd, *DDP, "parallel.workers=2", "--dry-run")
    assert "room for 0 of 2 workers now; the run asks the cluster's autoscaler for nodes" in planned.stdout, planned

    release = cwd / "release"
    paced = [f"model={{_target_: lab.Paced, ms: 100, release: {nodes.path(0, release)}}}", "train.epochs=150"]
    elastic = run(nodes, cwd, *DDP, "parallel.workers=[1, 2]", *paced)
    assert elastic.code == 0, elastic.output
    told = [event.message for event in elastic.events if isinstance(event, Warned)]
    assert [message for message in told if message.startswith("asked")] == [
        f"{ASKED.format("1 worker")}; waiting up to parallel.queue_timeout_s, 600 s", ASKED.format("1 worker"),
    ]  # fmt: skip
    assert [len(event.devices) for event in elastic.events if isinstance(event, Started)] == [1, 2]


def test_no_room_in_time(nodes: Nodes) -> None:
    cwd = project(nodes.storage(0) / "project", tracked=True)
    refused = run(nodes, cwd, *DDP, "parallel.workers=3", "parallel.queue_timeout_s=20")
    assert refused.code == 3, refused.output
    assert ASKED.format("3 workers") in refused.output
    fixed = run(nodes, cwd, *DDP, "parallel.workers=2")
    assert fixed.code == 0, fixed.output

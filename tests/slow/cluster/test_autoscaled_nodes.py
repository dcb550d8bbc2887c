"""A run on a cluster that starts with a head without cores: Ray's own autoscaler, with its fake provider, adds nodes.

The added nodes are processes on the head's machine.
"""

# promise: an autoscaler is asked for nodes; Ray's own

import json
from collections.abc import Iterator

import pytest
from nodes import Nodes
from projects import project, run
from ray.autoscaler._private.monitor import BASE_READONLY_CONFIG

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
"""What ``ray up`` sets for the second version of the autoscaler."""
DDP = ["parallel.strategy=ddp", "parallel.device=cpu", "parallel.cpus_per_worker=1", "checkpoint.every_steps=5"]


@pytest.fixture
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


@pytest.mark.parametrize("nodes", [SECOND], indirect=True, ids=["v2"])
def test_nodes_that_are_lacking_are_asked_for(nodes: Nodes) -> None:
    cwd = project(nodes.folder / "project", tracked=True)
    planned = run(nodes, cwd, *DDP, "parallel.workers=2", "--dry-run")
    assert "Room for 0 of 2 workers is free. The cluster's autoscaler may add nodes." in planned.stdout, planned
    nodes.await_nodes(1)

    too_many = run(nodes, cwd, *DDP, "parallel.workers=3", "parallel.start_timeout_s=2")
    assert too_many.code == 3, too_many.output
    assert "free within parallel.start_timeout_s (2 s)" in too_many.output

    ran = run(nodes, cwd, *DDP, "parallel.workers=2")
    assert ran.code == 0, ran.output

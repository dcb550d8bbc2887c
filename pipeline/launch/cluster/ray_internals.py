"""Questions to a Ray cluster that Ray's public interface doesn't answer, apart from the code that asks them.

The other private parts of Ray are in `pipeline.launch._ray`, where a local Ray is started and workers are placed.
"""

import json
import os

import ray
from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray._private.state import available_resources_per_node, state
from ray.experimental.internal_kv import _internal_kv_get

__all__ = ["addresses_of_nodes", "available_resources_per_node", "draining_nodes", "has_autoscaler"]

_ALIVE = 0  # of Ray's GcsNodeInfo
_NODE_TYPE = "ray.io/node-group"
"""Label with the type of a node that an autoscaler manages."""
_KUBERAY_START = "KUBERAY_GEN_RAY_START_CMD"
"""Environment variable with the command by which KubeRay has started this pod's node."""


def addresses_of_nodes(cluster: str) -> set[str]:
    """Return the addresses of a cluster's living nodes, without joining it."""
    ensure_token_if_auth_enabled(create_token_if_missing=False)  # as ray.init does before it asks
    nodes = ray._raylet.GcsClient(address=cluster).get_all_node_info().values()
    return {node.node_manager_address for node in nodes if node.state == _ALIVE}


def draining_nodes() -> dict[str, int]:
    """Return the deadlines of the nodes that are being drained, by Ray's id: ms since the epoch, 0 for none.

    Ray Train asks in the same way. Ray starts nothing new on these nodes, and a node that is idle ends by itself.
    """
    return dict(state.get_draining_nodes())


def has_autoscaler() -> bool:
    """Return True if the connected cluster has an autoscaler that can start nodes.

    Clusters whose nodes are started by hand have an autoscaler that only reports. Its second version knows no types of
    nodes there; the first version has a type for each node, named after it. KubeRay names types without an autoscaler,
    too, and Ray takes the second version then. The head has an own monitor there, which it has not with an autoscaler.
    """
    from ray.autoscaler.v2.utils import is_autoscaler_v2  # takes a moment, and a local Ray has no use for it

    if is_autoscaler_v2(fetch_from_server=True):
        start = os.environ.get(_KUBERAY_START, "").split()
        if "--head" in start and "--no-monitor" not in start:
            return False
        return any(_NODE_TYPE in node["Labels"] for node in ray.nodes())
    status = json.loads(_internal_kv_get(DEBUG_AUTOSCALING_STATUS) or "{}")
    types = (status.get("autoscaler_report") or {}).get("node_type_mapping") or {}
    return any(kind != f"node_{node}" for node, kind in types.items())

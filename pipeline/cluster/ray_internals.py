"""Questions to a Ray cluster that Ray's public interface doesn't answer, apart from the code that asks them.

The other private parts of Ray are in `pipeline.launchers._ray`, where a local Ray is started and workers are placed.
"""

import ray
from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
from ray._private.state import available_resources_per_node, state

__all__ = ["addresses_of_nodes", "available_resources_per_node", "draining_nodes"]

_ALIVE = 0  # of Ray's GcsNodeInfo


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

"""A real Ray's node says what it has."""

from importlib.metadata import version

import ray
import torch

from pipeline.launch.cluster import ask_nodes, connected


def test_a_real_ray_s_node_says_what_it_has() -> None:
    with connected(None, verbose=False):
        (node,), silent = ask_nodes()
        in_no_time, late = ask_nodes(timeout_s=0.0001)

    assert (silent, in_no_time) == ({}, [])
    assert late[node.label].startswith("it didn't answer within 0.0001 s")
    assert node.address is not None
    assert node.torch is not None
    assert (node.torch.version, node.torch.cuda) == (torch.__version__, torch.version.cuda)
    assert (node.ray, node.pipeline) == (ray.__version__, version("ddp-pipeline"))

"""A real Ray's node says what it has."""

import psutil
import ray

from pipeline.launch._ray.local import LocalRayRequest, started
from pipeline.launch.cluster.node_facts import facts_here
from pipeline.launch.cluster.nodes import ask_facts, read_facts
from pipeline.launch.cluster.placement import usable_nodes


def _own_processes() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def test_a_real_ray_s_node_says_what_it_has() -> None:
    with started(LocalRayRequest(), verbose=False):
        records = {record["NodeID"]: record for record in usable_nodes()}
        answers, silent = ask_facts(records).answers()
        (node,) = read_facts(answers, records=records)
        listening = {end.laddr.ip for process in _own_processes() for end in process.net_connections("inet")}
        in_no_time, late = ask_facts(records, timeout_s=0.0001).answers()

    assert (silent, in_no_time) == ({}, {})
    assert late[node.ray_node].startswith("it didn't answer within 0.0001 s")
    assert {ip.removeprefix("::ffff:") for ip in listening} == {"127.0.0.1"}
    assert (node.ray, node.pipeline) == (ray.__version__, facts_here().pipeline)

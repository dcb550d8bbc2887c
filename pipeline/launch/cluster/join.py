"""Joining an existing Ray cluster: its address, its resources, and a connection to it."""

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import psutil
import ray

from pipeline.errors import PipelineError, ResourceError, UsageError
from pipeline.experiment.schema import Parallel
from pipeline.launch.cluster.checks import find_other_versions, find_unfit
from pipeline.launch.cluster.connection import connection
from pipeline.launch.cluster.node_facts import facts_here
from pipeline.launch.cluster.nodes import ask_facts, read_facts
from pipeline.launch.cluster.placement import able_nodes, find_able_nodes
from pipeline.launch.cluster.ray_internals import addresses_of_nodes, available_resources_per_node, has_autoscaler
from pipeline.plan.resources import Resources, format_unfit
from pipeline.wording import first_line

_REACH_S = 10.0


def cluster_resources(address: str, parallel: Parallel) -> Resources:
    """Return the total resources of the nodes that can have workers.

    Raises:
        ResourceError: no cluster answers at the address, or none of its nodes can have workers.
    """
    with connected(address, verbose=False):
        is_autoscaled, available = has_autoscaler(), available_resources_per_node()
        able = find_able_nodes(parallel) if is_autoscaled else able_nodes(parallel)
        answers, silent = ask_facts(able).answers()
        facts = read_facts(answers, records=able)
    here = facts_here()
    problems = {str(node.ray_node): find_other_versions(node, here=here) for node in facts}
    unfit = find_unfit(problems | {node: [why] for node, why in silent.items()}, records=able)
    nodes = [node["Resources"] for id_, node in able.items() if id_ not in unfit]
    idle = tuple(available.get(id_, {}) for id_ in able if id_ not in unfit)
    if not nodes and not is_autoscaled:
        raise ResourceError("\n".join(["no node of the cluster can run workers:", *format_unfit(unfit.values())]))
    gpu = next((gpu.name for node in facts for gpu in node.gpus if node.ray_node not in unfit), "GPU")
    return Resources(
        cpus=int(sum(node.get("CPU", 0) for node in nodes)),
        memory_mb=int(sum(node.get("memory", 0) for node in nodes)) // 2**20,
        gpus=(gpu,) * int(sum(node.get("GPU", 0) for node in nodes)),
        node=f"Ray cluster at {address}",
        nodes=max(1, len(nodes)),  # also before an autoscaler has started any
        is_autoscaled=is_autoscaled,
        unfit=unfit,
        idle=idle,
    )


@contextmanager
def naming_address(parallel: Parallel) -> Iterator[None]:
    """Add to an error of the block that RAY_ADDRESS names the cluster: it may be left from an earlier session."""
    try:
        yield
    except PipelineError as error:
        if parallel.address is None and parallel.cluster is not None:
            error.add_note(
                f"RAY_ADDRESS={parallel.cluster} names this cluster. To start a local Ray instead, unset RAY_ADDRESS."
            )
        raise


@contextmanager
def connected(address: str, *, verbose: bool, runtime_env: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Connect to an existing cluster for the duration of the context.

    Args:
        address: address of the cluster, e.g. HOST:6379.
        verbose: show Ray's output.
        runtime_env: Ray's ``runtime_env`` for the workers.

    Raises:
        UsageError: the address leads to a dashboard or to Ray Client.
        ResourceError: no cluster answers at the address, or this machine is not one of its nodes.
    """

    def init(**logs: Any) -> None:
        _check_is_node(address)
        ray.init(address=address, **({"runtime_env": dict(runtime_env)} if runtime_env else {}), **logs)

    _check_reachable(address)
    with connection(init, refusal=partial(_refusal, address), verbose=verbose):
        yield


def _refusal(address: str, error: Exception) -> str:
    """Return a message of one line for Ray's error."""
    if "Version mismatch" in str(error):  # Ray has no type for it; its message has a line for each version
        return f"{address}: {' '.join(str(error).split())}. Use the same Python and Ray on all machines."
    return f"no Ray cluster answers at {address}: {first_line(error)}"


def _check_reachable(address: str) -> None:
    """Try to connect to the address, since Ray would retry for minutes.

    Raises:
        UsageError: the address leads to a dashboard or to Ray Client.
        ResourceError: the address refuses the connection.
    """
    if address.startswith(("http://", "https://")):
        raise UsageError(
            f"{address} is the address of a dashboard. To join a cluster, use HOST:6379. To send a run to a dashboard, "
            "use ray job submit."
        )
    if address.startswith("ray://"):
        raise UsageError(
            f"{address}: Ray Client is not supported. Send the run with ray job submit --address http://HOST:8265, "
            "or start it on a node of the cluster with HOST:6379."
        )
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()):  # such as "auto"
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except OSError as error:
        what = f"no Ray cluster answers at {address}: {error.strerror or error}"
        raise ResourceError(f"{what}. Check the address, and that Ray runs there.") from error


def _check_is_node(address: str) -> None:
    """Check that this machine is a node of the cluster; on any other machine Ray's driver aborts the process.

    Raises:
        ResourceError: this machine is not a node.
    """
    if not address.rpartition(":")[2].isdecimal():  # such as "auto"
        return
    there = addresses_of_nodes(address)
    here = {each.address for those in psutil.net_if_addrs().values() for each in those}
    if here.isdisjoint(there):
        raise ResourceError(
            f"this machine is not a node of the Ray cluster at {address}. Its nodes are {', '.join(sorted(there))}. "
            f"Add this machine with ray start --address={address} --num-cpus=0, or send the run with ray job submit."
        )

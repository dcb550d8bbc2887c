"""The Ray that workers run on: started here or joined."""

import logging
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psutil
import ray
from ray._private import ray_constants
from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
from ray.exceptions import AuthenticationError, RpcError

from pipeline import resources
from pipeline.config.parallel import Parallel
from pipeline.errors import ResourceError, UsageError
from pipeline.launchers._ray import room
from pipeline.launchers._ray.checks import refuse_others
from pipeline.launchers._ray.nodes import facts_of_nodes
from pipeline.launchers._ray.places import able_nodes
from pipeline.launchers.base import environment, own_signals
from pipeline.node_facts import facts_here
from pipeline.resources import Resources

LOOPBACK = "127.0.0.1"
_REACH_S = 10.0
_ALIVE = 0  # of Ray's GcsNodeInfo
_OBJECT_STORE_BYTES = 200_000_000  # events go over the channel and data is loaded by the workers
_STREAMED_BYTES = 500_000_000
_SETTINGS = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # the end of a trial waits for this poll
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",  # the controller is this process, see trainer.py
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # would print twice what user code prints
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # workers stay where relative paths of the experiment mean something
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # 15 by itself, which would make Ray's workers slower than torchrun's on a busy machine
    "RAY_enable_worker_prestart": "0",  # would start processes that nobody asked for
}


def cluster_address(parallel: Parallel) -> str | None:
    """Where the cluster is to be found; None starts a local Ray."""
    return parallel.address or os.environ.get("RAY_ADDRESS") or None


def cluster_resources(address: str, parallel: Parallel) -> Resources:
    """The sum of all nodes of a cluster that can have workers.

    Raises:
        ResourceError: there is no cluster at that address, or its nodes can't be used.
    """
    with connected(address, verbose=False):
        able = able_nodes(parallel)
        facts = [node for node in facts_of_nodes(timeout_s=parallel.start_timeout_s) if node.ray_node in able]
        refuse_others(facts, here=facts_here())
    nodes = [node["Resources"] for node in able.values()]
    gpu = next((gpu.name for node in facts for gpu in node.gpus), "GPU")
    return Resources(
        cpus=int(sum(node.get("CPU", 0) for node in nodes)),
        memory_mb=int(sum(node.get("memory", 0) for node in nodes)) // 2**20,
        gpus=(gpu,) * int(sum(node.get("GPU", 0) for node in nodes)),
        node=f"Ray cluster at {address}",
        nodes=len(nodes),
    )


@contextmanager
def connected(
    address: str | None, *, verbose: bool, streams: bool = False, runtime_env: Mapping[str, Any] | None = None
) -> Iterator[None]:
    """A local Ray that listens on loopback only, or a cluster that was there before.

    Args:
        address: the cluster's; None starts a local one.
        verbose: whether to let Ray's output through.
        streams: whether a local Ray also reads the data, beside the workers, as loader processes would.
        runtime_env: Ray's description of what workers need.

    Raises:
        ResourceError: there is no cluster at that address.
    """
    local: dict[str, Any] = {
        "address": "local",
        "include_dashboard": False,
        "num_cpus": resources.detect().cpus + room.READERS * streams,
        "object_store_memory": _STREAMED_BYTES if streams else _OBJECT_STORE_BYTES,
        "_node_ip_address": LOOPBACK,
    }
    level = logging.INFO if verbose else logging.ERROR
    logging.getLogger("ray").setLevel(level)
    logging.getLogger("ray.train").setLevel(logging.INFO if verbose else logging.CRITICAL)  # errors are raised, too
    # Ray turns its token authentication on and redirects breakpoint(), both by setting variables in this process.
    with environment(**_SETTINGS, RAY_AUTH_MODE=None, PYTHONBREAKPOINT=None), own_signals():
        if address is not None:
            _check_reachable(address)
        try:
            # Else Ray would answer SIGTERM for the rest of the run.
            with own_signals(), _on_loopback(local=address is None):
                if address is not None:
                    _check_is_node(address)
                ray.init(
                    **(local if address is None else {"address": address}),
                    **({"runtime_env": dict(runtime_env)} if runtime_env else {}),
                    log_to_driver=verbose,
                    logging_level=level,
                    configure_logging=verbose,
                )
        except (ConnectionError, ValueError, RuntimeError, AuthenticationError, RpcError) as error:
            raise ResourceError(_refusal(error, address)) from error
        try:
            yield
        finally:
            ray.shutdown()


@contextmanager
def _on_loopback(*, local: bool) -> Iterator[None]:
    """Have a local Ray listen on loopback only. Ray replaces 127.0.0.1 by the machine's address, but on macOS."""
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = before and not local
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _refusal(error: Exception, address: str | None) -> str:
    """Why Ray can't be used, in one line."""
    if address is None:
        return f"a local Ray could not be started: {first_line(error)}"
    if "Version mismatch" in str(error):  # Ray's text has a line for each version
        return f"{address}: {' '.join(str(error).split())}; use the same Python and Ray on all machines"
    return f"no Ray cluster answers at {address}: {first_line(error)}"


def _check_reachable(address: str) -> None:
    """Try the address ourselves: Ray would go on trying for minutes.

    Raises:
        UsageError: it is the address of something else.
        ResourceError: nobody listens there.
    """
    if address.startswith(("http://", "https://")):
        raise UsageError(
            f"{address} is a dashboard, where pipeline submit sends runs; to join a cluster, write HOST:6379"
        )
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()):  # such as "auto"
        return
    try:
        socket.create_connection((host.removeprefix("ray://"), int(port)), timeout=_REACH_S).close()
    except OSError as error:
        raise ResourceError(f"no Ray cluster answers at {address}: {error.strerror or error}") from error


def _check_is_node(address: str) -> None:
    """Ask whether Ray runs on this machine, too: without it, Ray's driver would abort this process.

    Raises:
        ResourceError: it doesn't.
    """
    if not address.rpartition(":")[2].isdecimal():  # such as "auto"
        return
    ensure_token_if_auth_enabled(create_token_if_missing=False)  # as ray.init does before it asks
    nodes = ray._raylet.GcsClient(address=address).get_all_node_info().values()
    there = sorted({node.node_manager_address for node in nodes if node.state == _ALIVE})
    here = {each.address for those in psutil.net_if_addrs().values() for each in those}
    if here.isdisjoint(there):
        raise ResourceError(
            f"this machine is no node of the Ray cluster at {address}, whose nodes are {', '.join(there)}; make it one "
            f"with ray start --address={address} --num-cpus=0, or send the run there with pipeline submit"
        )


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]

"""The Ray that workers run on: started here or joined, and whether it has room."""

import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray

from pipeline import resources
from pipeline.config.schema import Parallel
from pipeline.contract import Trial
from pipeline.errors import ResourceError
from pipeline.launchers.base import environment, own_signals
from pipeline.resources import Resources

LOOPBACK = "127.0.0.1"
_REACH_S = 10.0
_OBJECT_STORE_BYTES = 200_000_000  # events go over the channel and data is loaded by the workers
_SETTINGS = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # the end of a trial waits for this poll
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # would print twice what user code prints
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # workers stay where relative paths of the experiment mean something
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",  # would start processes that nobody asked for
}


def cluster_address(parallel: Parallel) -> str | None:
    """Where the cluster is to be found; None starts a local Ray."""
    return parallel.address or os.environ.get("RAY_ADDRESS") or None


def cluster_resources(address: str) -> Resources:
    """The sum of all nodes of a cluster.

    Raises:
        ResourceError: there is no cluster at that address.
    """
    with connected(address, verbose=False):
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return Resources(
        cpus=int(sum(node.get("CPU", 0) for node in nodes)),
        memory_mb=int(sum(node.get("memory", 0) for node in nodes)) // 2**20,
        gpus=("GPU",) * int(sum(node.get("GPU", 0) for node in nodes)),
        node=f"Ray cluster at {address}",
        nodes=len(nodes),
    )


@contextmanager
def connected(address: str | None, *, verbose: bool) -> Iterator[None]:
    """A local Ray that listens on loopback only, or a cluster that was there before.

    Raises:
        ResourceError: there is no cluster at that address.
    """
    local: dict[str, Any] = {
        "address": "local",
        "include_dashboard": False,
        "num_cpus": resources.detect().cpus,
        "object_store_memory": _OBJECT_STORE_BYTES,
        "_node_ip_address": LOOPBACK,
    }
    level = logging.INFO if verbose else logging.ERROR
    logging.getLogger("ray").setLevel(level)
    # Ray turns its token authentication on and redirects breakpoint(), both by setting variables in this process.
    with environment(**_SETTINGS, RAY_AUTH_MODE=None, PYTHONBREAKPOINT=None), own_signals():
        if address is not None:
            _check_reachable(address)
        try:
            with own_signals():  # else Ray would answer SIGTERM for the rest of the run
                ray.init(
                    **(local if address is None else {"address": address}),
                    log_to_driver=verbose,
                    logging_level=level,
                    configure_logging=verbose,
                )
        except (ConnectionError, ValueError, RuntimeError) as error:
            where = "a local Ray could not be started" if address is None else f"no Ray cluster answers at {address}"
            raise ResourceError(f"{where}: {first_line(error)}") from error
        try:
            yield
        finally:
            ray.shutdown()


def _check_reachable(address: str) -> None:
    """Try the address ourselves: Ray would go on trying for minutes.

    Raises:
        ResourceError: nobody listens there.
    """
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()):  # such as "auto"
        return
    try:
        socket.create_connection((host.removeprefix("ray://"), int(port)), timeout=_REACH_S).close()
    except OSError as error:
        raise ResourceError(f"no Ray cluster answers at {address}: {error.strerror or error}") from error


def await_room(trial: Trial) -> None:
    """Wait until the workers fit. Ray itself would wait for ever, with a traceback a minute.

    Raises:
        ResourceError: the cluster is too small, or not free within ``parallel.start_timeout_s``.
    """
    asked = {name: amount * trial.workers for name, amount in per_worker(trial).items()}
    if not _covers(ray.cluster_resources(), asked):
        raise ResourceError(f"asked for {asked_for(trial)}; the Ray cluster has {_amounts(ray.cluster_resources())}")
    deadline = time.monotonic() + trial.experiment.parallel.start_timeout_s
    while not _covers(ray.available_resources(), asked):
        if time.monotonic() > deadline:
            raise ResourceError(
                f"asked for {asked_for(trial)}; the Ray cluster has {_amounts(ray.cluster_resources())}, of which "
                f"{_amounts(ray.available_resources())} came free within parallel.start_timeout_s, "
                f"{trial.experiment.parallel.start_timeout_s:g} s"
            )
        time.sleep(0.2)


def per_worker(trial: Trial) -> dict[str, float]:
    """What each worker of a trial occupies, in Ray's terms."""
    amounts: dict[str, float] = {"CPU": trial.cpus_per_worker}
    if trial.device == "cuda":
        amounts["GPU"] = trial.devices_per_worker
    return amounts


def _covers(there: Mapping[str, float], asked: Mapping[str, float]) -> bool:
    return all(there.get(name, 0) >= amount for name, amount in asked.items())


def asked_for(trial: Trial) -> str:
    """The workers of a trial in words."""
    return f"{trial.workers} workers with {_amounts(per_worker(trial))} each"


def _amounts(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{amounts.get(name, 0):g} {name}" for name in ("CPU", "GPU") if name in amounts) or "no CPU"


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]

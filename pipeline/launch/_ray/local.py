"""A local Ray for the trials of a run, on this machine alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import ray

from pipeline.launch._ray.interface import public_because
from pipeline.launch.cluster.connection import connection
from pipeline.launch.cluster.placement import SPARE
from pipeline.plan import resources
from pipeline.wording import first_line

LOOPBACK = "127.0.0.1"
_SETTINGS = {
    "RAY_raylet_client_connect_timeout_milliseconds": "50",  # between two attempts to connect to a socket
    "RAY_raylet_client_num_connect_attempts": "600",
}
_OBJECT_STORE_BYTES = 200_000_000  # events go over the channel and data is loaded by the workers


class LocalRayRequest(NamedTuple):
    """Requirements of a local Ray."""

    workers: int = 0
    """Number of processes that start at once and import what workers need; they become the first workers."""


@contextmanager
def started(wanted: LocalRayRequest, *, verbose: bool) -> Iterator[None]:
    """Start a Ray that ends with the thread that started it.

    Started by the public interface it listens on this machine's address, otherwise on loopback only.

    Args:
        wanted: its requirements.
        verbose: pass the output of Ray and the workers on to the terminal.

    Raises:
        ResourceError: it can't be started.
    """
    is_public = bool(public_because())
    cpus = resources.detect().cpus
    # Workers may use all cores. A data function with Ray Data would wait forever for a CPU.

    def init(**logs: Any) -> None:
        with _faster(wanted, verbose=verbose, is_public=is_public) as options:
            ray.init(
                address="local",
                include_dashboard=False,
                num_cpus=2 * cpus,
                resources={SPARE: cpus},
                object_store_memory=_OBJECT_STORE_BYTES,
                **options,
                **logs,
            )

    def refusal(error: Exception) -> str:
        remedy = ". Set TMPDIR to a shorter path." if "AF_UNIX path length" in str(error) else ""
        return f"a local Ray could not be started: {first_line(error)}{remedy}"

    with connection(init, refusal=refusal, verbose=verbose, settings={} if is_public else _settings(wanted)):
        yield


@contextmanager
def _faster(wanted: LocalRayRequest, *, verbose: bool, is_public: bool) -> Iterator[dict[str, Any]]:
    """Make ray.init faster, unless only the public interface is used; yield further arguments for it."""
    if is_public:
        yield {}
        return
    from pipeline.launch._ray.fast.lean_node import lean

    with lean(workers=wanted.workers, verbose=verbose):
        yield {"_node_ip_address": LOOPBACK}


def _settings(wanted: LocalRayRequest) -> dict[str, str]:
    settings = dict(_SETTINGS)
    if wanted.workers:
        # Ray would end them as idle as soon as a placement group has reserved the cores for them.
        settings["RAY_kill_idle_workers_interval_ms"] = "0"
        settings["RAY_preload_python_modules"] = "pipeline.launch._ray.preloaded"
    return settings

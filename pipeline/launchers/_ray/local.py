"""What a Ray of this machine alone is made of: less than ray.init starts, and sooner.

By itself, ray.init starts a server for the dashboard, a monitor for the autoscaler and a reader of log files, each a
Python process that imports Ray, and waits for the first of them. One node has nothing to scale, and nobody asks for its
dashboard. See docs/decisions/0011-time-to-first-step.md.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import ray
import ray._private.node
import ray._private.utils
from ray._private import ray_constants, services

from pipeline.cluster.connection import connection, first_line
from pipeline.cluster.placement import READERS
from pipeline.launchers._ray.private import replaced
from pipeline.planning import resources

LOOPBACK = "127.0.0.1"
_PRESTARTED = "--num_prestart_python_workers="
_SETTINGS = {
    "RAY_raylet_client_connect_timeout_milliseconds": "50",  # between two tries to connect to a socket that isn't there
    "RAY_raylet_client_num_connect_attempts": "600",
}
_OBJECT_STORE_BYTES = 200_000_000  # events go over the channel and data is loaded by the workers
_STREAMED_BYTES = 500_000_000
_POLL_S = 0.02
_START_S = 30.0


class LocalRayRequest(NamedTuple):
    """What a local Ray is for."""

    workers: int = 0
    """Processes that start at once and import what workers of a training need; they become the first workers."""
    streams: bool = False
    """Whether Ray also reads the data, beside the workers, as loader processes would."""


@contextmanager
def started(wanted: LocalRayRequest, *, verbose: bool) -> Iterator[None]:
    """A Ray that listens on loopback only, for as long as the thread lives that has started it.

    Args:
        wanted: what it is for.
        verbose: whether to let Ray's and the workers' output through.

    Raises:
        ResourceError: it can't be started.
    """

    def init(**logs: Any) -> None:
        with _lean(wanted, verbose=verbose):
            ray.init(
                address="local",
                include_dashboard=False,
                num_cpus=resources.detect().cpus + READERS * wanted.streams,
                object_store_memory=_STREAMED_BYTES if wanted.streams else _OBJECT_STORE_BYTES,
                _node_ip_address=LOOPBACK,
                **logs,
            )

    with connection(init, refusal=_refusal, verbose=verbose, settings=_settings(wanted)):
        yield


def _settings(wanted: LocalRayRequest) -> dict[str, str]:
    settings = dict(_SETTINGS)
    if wanted.workers:
        # Ray would end them as idle as soon as a placement group has reserved the cores for them.
        settings["RAY_kill_idle_workers_interval_ms"] = "0"
    if wanted.workers and not wanted.streams:  # Ray's tasks that read data would load it all, too
        settings["RAY_preload_python_modules"] = "pipeline.launchers._ray.preloaded"
    return settings


def _refusal(error: Exception) -> str:
    return f"a local Ray could not be started: {first_line(error)}"


@contextmanager
def _lean(wanted: LocalRayRequest, *, verbose: bool) -> Iterator[None]:
    """Have ray.init start what is needed."""
    start = services.start_ray_process

    def start_ray_process(command: list[str], *arguments: Any, **more: Any) -> Any:
        return start([_prestarting(wanted.workers, part) for part in command], *arguments, **more)

    with (
        # Ray replaces 127.0.0.1 by the machine's address, but on macOS.
        replaced(ray_constants, ENABLE_RAY_CLUSTER=False),
        replaced(ray._private.node, Node=_VerboseNode if verbose else _Node),
        replaced(services, start_ray_process=start_ray_process),
        # Ray's agent leaves out its HTTP server where the dashboard isn't installed.
        replaced(ray._private.utils, get_dashboard_dependency_error=lambda: "not wanted here"),
    ):
        yield


def _prestarting(workers: int, part: str) -> str:
    """A part of a command; by itself Ray starts as many processes in advance as the machine has cores."""
    return f"{_PRESTARTED}{workers}" if part.startswith(_PRESTARTED) else part


class _VerboseNode(ray._private.node.Node):  # type: ignore[misc]
    """The processes of a node."""

    def start_monitor(self) -> None:
        """There is nothing to scale."""

    def start_api_server(self, **_: object) -> None:
        """Nobody asks it."""

    def start_raylet(self, *arguments: Any) -> None:
        """Start what starts workers, and wait until it is there: Ray would look once a second."""
        super().start_raylet(*arguments)
        deadline = time.monotonic() + _START_S
        while not self.get_gcs_client().get_all_node_info() and time.monotonic() < deadline:
            time.sleep(_POLL_S)


class _Node(_VerboseNode):
    """Those of a node whose workers' output goes to the run's folder."""

    def start_log_monitor(self) -> None:
        """Nobody reads what it would pass on."""

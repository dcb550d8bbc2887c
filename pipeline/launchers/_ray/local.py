"""A local Ray with fewer processes than ray.init starts, and sooner.

ray.init starts a dashboard server, a monitor for the autoscaler and a reader of log files, each a Python process that
imports Ray, and waits for the first. A single node has nothing to scale, and no one opens its dashboard. See
docs/decisions/0011-time-to-first-step.md.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import ray
import ray._private.node
import ray._private.utils
from ray._private import ray_constants, services

from pipeline.cluster.connection import connection
from pipeline.cluster.placement import READERS
from pipeline.planning import resources
from pipeline.wording import first_line

LOOPBACK = "127.0.0.1"
_PRESTARTED = "--num_prestart_python_workers="
_SETTINGS = {
    "RAY_raylet_client_connect_timeout_milliseconds": "50",  # between two attempts to connect to a socket
    "RAY_raylet_client_num_connect_attempts": "600",
}
_OBJECT_STORE_BYTES = 200_000_000  # events go over the channel and data is loaded by the workers
_STREAMED_BYTES = 500_000_000
_POLL_S = 0.02
_START_S = 30.0


class LocalRayRequest(NamedTuple):
    """Requirements of a local Ray."""

    workers: int = 0
    """Number of processes that start at once and import what workers need; they become the first workers."""
    streams: bool = False
    """True if Ray also reads the data, beside the workers."""


@contextmanager
def started(wanted: LocalRayRequest, *, verbose: bool) -> Iterator[None]:
    """Start a Ray that listens on loopback only; it ends with the thread that started it.

    Args:
        wanted: its requirements.
        verbose: pass the output of Ray and the workers on to the terminal.

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

    def refusal(error: Exception) -> str:
        return f"a local Ray could not be started: {first_line(error)}"

    with connection(init, refusal=refusal, verbose=verbose, settings=_settings(wanted)):
        yield


def _settings(wanted: LocalRayRequest) -> dict[str, str]:
    settings = dict(_SETTINGS)
    if wanted.workers:
        # Ray would end them as idle as soon as a placement group has reserved the cores for them.
        settings["RAY_kill_idle_workers_interval_ms"] = "0"
    if wanted.workers and not wanted.streams:  # Ray's tasks that read data would load it all, too
        settings["RAY_preload_python_modules"] = "pipeline.launchers._ray.preloaded"
    return settings


@contextmanager
def replaced(module: Any, **parts: object) -> Iterator[None]:
    """Replace private attributes of a module of Ray inside the block; Ray's release is pinned because of it."""
    with ExitStack() as stack:
        for name, part in parts.items():
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, part)
        yield


@contextmanager
def _lean(wanted: LocalRayRequest, *, verbose: bool) -> Iterator[None]:
    """Make ray.init start only what is needed."""
    start = services.start_ray_process

    def start_ray_process(command: list[str], *arguments: Any, **more: Any) -> Any:
        # Ray's own number of prestarted processes is the number of cores.
        ours = (f"{_PRESTARTED}{wanted.workers}" if part.startswith(_PRESTARTED) else part for part in command)
        return start([*ours], *arguments, **more)

    with (
        # Ray replaces 127.0.0.1 by the machine's address, except on macOS.
        replaced(ray_constants, ENABLE_RAY_CLUSTER=False),
        replaced(ray._private.node, Node=_VerboseNode if verbose else _Node),
        replaced(services, start_ray_process=start_ray_process),
        # Ray's agent leaves out its HTTP server where the dashboard isn't installed.
        replaced(ray._private.utils, get_dashboard_dependency_error=lambda: "not needed"),
    ):
        yield


class _VerboseNode(ray._private.node.Node):  # type: ignore[misc]
    """A node without autoscaler and dashboard."""

    def start_monitor(self) -> None:
        """Start nothing: there is nothing to scale."""

    def start_api_server(self, **_: object) -> None:
        """Start nothing: no one asks it."""

    def start_raylet(self, *arguments: Any) -> None:
        """Start the raylet and wait until it is registered, for which Ray would poll once a second."""
        super().start_raylet(*arguments)
        deadline = time.monotonic() + _START_S
        while not self.get_gcs_client().get_all_node_info() and time.monotonic() < deadline:
            time.sleep(_POLL_S)


class _Node(_VerboseNode):
    """A node whose workers write their output into the run's folder."""

    def start_log_monitor(self) -> None:
        """Start nothing: no one reads what it would pass on."""

"""A local Ray with fewer processes than ray.init starts, and sooner.

ray.init starts a dashboard server, a monitor for the autoscaler and a reader of log files, each a Python process that
imports Ray, and waits for the first. A single node has nothing to scale, and no one opens its dashboard. See
docs/decisions/0011-time-to-first-step.md.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
import ray._private.node
import ray._private.utils
from ray._private import ray_constants, services

from pipeline.launch._ray.fast.patching import replaced

_PRESTARTED = "--num_prestart_python_workers="
_POLL_S = 0.02
_START_S = 30.0


@contextmanager
def lean(*, workers: int, verbose: bool) -> Iterator[None]:
    """Make ray.init start only what is needed, with as many processes for workers as there will be."""
    start = services.start_ray_process

    def start_ray_process(command: list[str], *arguments: Any, **more: Any) -> Any:
        # Ray's own number of prestarted processes is the number of cores.
        ours = (f"{_PRESTARTED}{workers}" if part.startswith(_PRESTARTED) else part for part in command)
        return start([*ours], *arguments, **more)

    with (
        # Ray replaces 127.0.0.1 by the machine's address, except on macOS.
        replaced(ray_constants, ENABLE_RAY_CLUSTER=False),
        replaced(ray._private.node, Node=VerboseNode if verbose else Node),
        replaced(services, start_ray_process=start_ray_process),
        # Ray's agent leaves out its HTTP server where the dashboard isn't installed.
        replaced(ray._private.utils, get_dashboard_dependency_error=lambda: "not needed"),
    ):
        yield


class VerboseNode(ray._private.node.Node):  # type: ignore[misc]
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


class Node(VerboseNode):
    """A node whose workers write their output into the run's folder."""

    def start_log_monitor(self) -> None:
        """Start nothing: no one reads what it would pass on."""


OVERRIDES: dict[type, tuple[str, ...]] = {
    VerboseNode: ("start_monitor", "start_api_server", "start_raylet"),
    Node: ("start_log_monitor",),
}
"""Methods of Ray's that are replaced; with other parameters they are another release's."""

"""Where the ranks of a trial meet, and the network interface over which they exchange gradients.

Ray's `TorchConfig` would make the process group itself. It imports torch in Ray's controller, which starts before the
workers do: about two seconds of each trial's start. Here a worker is told what torchrun tells its own, and makes the
group as it does there, see `pipeline.worker.main`.

Left alone, gloo takes the address that a node's own name resolves to. On Debian and in containers that is often one of
loopback, and ranks on several nodes never meet. So each rank is told the interface that owns the address under which
its node joined Ray.
"""

import os
import socket
from typing import Any

import ray
from ray.train.backend import Backend, BackendConfig

from pipeline.cluster.node_check import interfaces


def use_interface(name: str | None) -> None:
    """Have gloo and NCCL use an interface; None: what the node's environment says, else the one of Ray's address."""
    if name is not None:
        os.environ.update(_variables(name))
        return
    address = ray.util.get_node_ip_address()
    for own in (there for there, addresses in interfaces().items() if address in addresses):
        os.environ.update({**_variables(own), **os.environ})


def _variables(interface: str) -> dict[str, str]:
    """NCCL takes a name without the sign for the beginning of one."""
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}


class Meeting(BackendConfig):  # type: ignore[misc]
    """Tells the workers of a `DataParallelTrainer` their interface and the address of rank 0."""

    def __init__(self, *, interface: str | None) -> None:
        self.interface = interface

    @property
    def backend_cls(self) -> type:
        """What Ray calls when the workers are there."""
        return _Backend


class _Backend(Backend):  # type: ignore[misc]
    share_cuda_visible_devices = True  # as Ray's own for torch: NCCL connects GPUs of a node that see each other

    def on_start(self, worker_group: Any, backend_config: Meeting) -> None:
        address, port = worker_group.execute_single(0, _free_address)
        worker_group.execute(_prepare, backend_config.interface, address=address, port=port)


def _free_address() -> tuple[str, int]:
    """This node's address in Ray, and a port that is free there now."""
    address = ray.util.get_node_ip_address()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return address, int(probe.getsockname()[1])


def _prepare(interface: str | None, *, address: str, port: int) -> None:
    use_interface(interface)
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))

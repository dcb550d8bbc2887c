"""The network interface over which ranks exchange gradients.

Left alone, gloo takes the address that a node's own name resolves to. On Debian and in containers that is often one of
loopback, and ranks on several nodes never meet. So each rank is told the interface that owns the address under which
its node joined Ray.
"""

import os
from dataclasses import dataclass
from typing import Any

import ray
from ray.train.torch import TorchConfig
from ray.train.torch.config import _TorchBackend

from pipeline.launchers._ray.look import interfaces


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


@dataclass
class OverInterface(TorchConfig):  # type: ignore[misc]
    """A `TorchConfig` whose workers use one network interface, see `use_interface`."""

    interface: str | None = None

    @property
    def backend_cls(self) -> type:
        """What introduces the workers to each other."""
        return _Backend


class _Backend(_TorchBackend):  # type: ignore[misc]
    def on_start(self, worker_group: Any, backend_config: OverInterface) -> None:
        worker_group.execute(use_interface, backend_config.interface)
        super().on_start(worker_group, backend_config)

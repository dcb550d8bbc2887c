"""Rendezvous of a trial's ranks under Ray, and the network interface over which they exchange gradients.

Ray's `TorchConfig` would make the process group itself, but imports torch in Ray's controller before the workers start,
which delays each trial by two seconds. Here workers get torchrun's environment variables and make the group themselves,
see `pipeline.worker`.

Each rank is given the interface that owns the address under which its node joined Ray, see
`pipeline.launch.outer`.
"""

import os
from typing import Any

import ray
from ray.train.backend import Backend, BackendConfig

from pipeline.launch.outer import interface_variables
from pipeline.protocol.channel import open_server


class RendezvousConfig(BackendConfig):  # type: ignore[misc]
    """Sends the workers of a trainer their interface and the address of rank 0."""

    backend = "made by the workers"
    """Asked for by `TorchTrainer`."""

    @property
    def backend_cls(self) -> type:
        """The class whose ``on_start`` Ray calls once all workers have started."""
        return _Backend


class _Backend(Backend):  # type: ignore[misc]
    share_cuda_visible_devices = True  # as in Ray's TorchConfig: NCCL connects GPUs of a node that see each other

    def on_start(self, worker_group: Any, backend_config: RendezvousConfig) -> None:
        address, port = worker_group.execute_single(0, _free_address)
        worker_group.execute(_prepare, address=address, port=port)


def _free_address() -> tuple[str, int]:
    """Return this node's address in Ray, and a port that is free now."""
    address = ray.util.get_node_ip_address()
    with open_server(address) as probe:
        return address, int(probe.getsockname()[1])


def _prepare(*, address: str, port: int) -> None:
    """Set the address of rank 0 and the interface of gloo and NCCL: the environment's, or Ray's."""
    own = ray.util.get_node_ip_address()
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port), **interface_variables(own))

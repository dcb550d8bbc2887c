"""Ray Train's trainer by its public interface: slower to start, but with any release of Ray."""

from collections.abc import Callable
from typing import Any

from ray.train.torch import TorchTrainer

from pipeline.launch._ray.network import RendezvousConfig


class PublicTrainer(TorchTrainer):  # type: ignore[misc]
    """A `TorchTrainer` whose process group is made by the workers."""

    def __init__(
        self, train_loop_per_worker: Callable[[dict[str, Any]], None], *, backend_config: RendezvousConfig, **more: Any
    ) -> None:
        super().__init__(train_loop_per_worker, torch_config=backend_config, **more)

    def cancel(self) -> None:
        """Do nothing: the controller and the workers end with the driver's connection to Ray."""

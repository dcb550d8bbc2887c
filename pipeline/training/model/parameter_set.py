"""The parameters that an optimizer updates, with their gradients."""

from functools import cached_property

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeline.training.ranks.norms import total_norm


class ParameterSet:
    """An optimizer's parameters and their gradients; ``name`` is that of one of several optimizers."""

    def __init__(self, optimizer: Optimizer, *, device: torch.device, name: str = "") -> None:
        self.optimizer, self.name = optimizer, name
        self.parameters: list[nn.Parameter] = [one for group in optimizer.param_groups for one in group["params"]]
        self._device = device
        self._norm: Tensor | None = None

    def gradients(self) -> list[Tensor]:
        """Return the gradients that there are."""
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def norm(self) -> Tensor:
        """Return the norm of all gradients as backward has left them, a scalar. Collective if they are sharded."""
        if self._norm is None:
            self._norm = total_norm(self.gradients(), device=self._device)
        return self._norm

    @cached_property
    def by_kind(self) -> list[list[nn.Parameter]]:
        """Sharded parameters and whole ones, which torch can't clip together."""
        sharded = [one for one in self.parameters if hasattr(one, "device_mesh")]
        whole = [one for one in self.parameters if not hasattr(one, "device_mesh")]
        return [kind for kind in (sharded, whole) if kind]

    def clear(self) -> None:
        """Set all gradients to None; parameters that this optimizer does not have keep theirs."""
        self._norm = None
        self.optimizer.zero_grad(set_to_none=True)

"""Post-local SGD for slow links: workers step on their own gradients and average their weights periodically.

Lin et al. 2018, "Don't Use Large Mini-Batches, Use Local SGD", arXiv 1808.07217. Until it begins, gradients are
averaged in each step, which the paper found important. Each worker's optimizer keeps its own state.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState


class LocalSGD:
    """Step counter that tells torch's hook when to stop exchanging gradients, and averages the weights."""

    def __init__(self, *, period: int, start_step: int) -> None:
        self._period = period
        self._start_step = start_step
        self._steps = 0
        self.hook_state = PostLocalSGDState(  # type: ignore[no-untyped-call]
            process_group=None, subgroup=None, start_localSGD_iter=start_step, post_local_gradient_allreduce=False
        )

    @property
    def is_local_step(self) -> bool:
        """True if the gradients of the next step stay on their ranks."""
        return self._steps >= self._start_step

    @property
    def has_diverged(self) -> bool:
        """True if ranks may hold different weights and optimizer states."""
        return self._steps > self._start_step

    def set_step(self, *, steps: int) -> None:
        """Set the number of steps taken so far."""
        self._steps = steps
        self.hook_state.iter = steps  # torch counts backward passes, of which a step may have several

    def after_step(self, model: nn.Module) -> None:
        """Count a step, and average the weights at the end of a period. Collective."""
        self.set_step(steps=self._steps + 1)
        if self.has_diverged and (self._steps - self._start_step) % self._period == 0:
            average(model)

    @contextmanager
    def averaged_weights(self, model: nn.Module) -> Iterator[None]:
        """Put the average of all ranks' weights into the model, and restore weights and buffers on exit. Collective."""
        if not self.has_diverged:
            yield
            return
        changed = [*_trained(model), *model.buffers()]
        own = [tensor.detach().clone() for tensor in changed]
        average(model)
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, before in zip(changed, own, strict=True):
                    tensor.copy_(before)


@torch.no_grad()
def average(model: nn.Module) -> None:
    """Replace each trainable parameter by its mean over all ranks. Collective.

    torch's average_parameters moves parameters to new memory, which breaks recorded CUDA graphs, and skips parameters
    without a gradient, which may differ from rank to rank.
    """
    parameters = _trained(model)
    for kind in dict.fromkeys((one.dtype, one.device) for one in parameters):
        chosen = [one for one in parameters if (one.dtype, one.device) == kind]
        flat = torch.cat([one.reshape(-1) for one in chosen])
        flat /= dist.get_world_size()  # before the sum, as in DistributedDataParallel
        dist.all_reduce(flat)
        parts = torch.split(flat, [one.numel() for one in chosen])
        torch._foreach_copy_(chosen, [part.view_as(one) for part, one in zip(parts, chosen, strict=True)])


def _trained(model: nn.Module) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]

"""A step's loss where losses are means over something else than samples, such as the tokens that aren't padding.

Of micro-batches whose losses were divided by weights, the loss of the whole step is the sum of loss times weight over
the sum of the weights, all micro-batches of all ranks taken together.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipeline.tasks import StepOutput
from pipeline.training.norms import local
from pipeline.training.order import MicroBatch


class Denominator:
    """What the losses of one optimizer step are divided by.

    With one micro-batch for each rank it is known before the backward pass. With several, backward begins with what
    the first ones make likely, so that gradients are about as large as those of a mean (fp16 would overflow with those
    of a sum), and they are corrected once at the end. Where a rank steps by itself, the sum is its own.
    """

    def __init__(
        self, *, micro_batches: int, is_shared: bool, is_local_step: bool, boundary: "Boundary | None"
    ) -> None:
        """Begin a step.

        Args:
            micro_batches: in the step, on each rank.
            is_shared: True if the divisor is summed over all ranks.
            is_local_step: True if ranks step on their own gradients.
            boundary: of the model, if gradients of NaN must be kept from it.
        """
        self._micro_batches, self._is_shared = micro_batches, is_shared
        self._is_local_step, self._boundary = is_local_step, boundary
        self._weights: list[Tensor] = []
        self._samples = 0.0
        self._likely = torch.ones(())

    def counted(self, output: StepOutput, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return a micro-batch's loss, 0 if it has no weight, and its factor. Collective if the divisor is shared."""
        assert output.weight is not None
        weight = output.weight * bool(micro_batch.weight)  # the sample of a rank that has none left counts nothing
        if not self._weights:
            self._likely = _not_zero(self._first(weight, micro_batch))
        self._weights.append(weight)
        self._samples += micro_batch.weight
        return self._loss(output.loss, weight), weight / self._likely

    def settle(self, loss: Tensor, *, gradients: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Correct the gradients after the last micro-batch; return the sum of losses, and of weights.

        Weights only where ranks step by themselves: elsewhere the sum of losses is already divided by those of all.
        """
        if self._micro_batches == 1 and not self._is_local_step:
            return loss, None
        own = torch.stack(self._weights).sum()
        sums = (loss * self._likely, own) if self._is_local_step else None
        if sums is not None and self._micro_batches == 1:
            return sums
        known = self._summed(own) if self._is_shared else own / (self._samples or 1)
        factor = self._likely / _not_zero(known)
        multiply(gradients, factor)
        return sums or (loss * factor, None)

    def _first(self, weight: Tensor, micro_batch: MicroBatch) -> Tensor:
        """What the first micro-batches say of the sum."""
        if self._is_shared:
            return self._summed(weight) * self._micro_batches
        return weight / (micro_batch.weight or 1)

    def _summed(self, weight: Tensor) -> Tensor:
        total = weight.clone()
        dist.all_reduce(total)
        return total

    def _loss(self, loss: Tensor, weight: Tensor) -> Tensor:
        boundary = self._boundary
        if boundary is not None and boundary.is_known and not weight:  # the host waits for the device
            return boundary.nothing()
        return _or_nothing(loss, weight)


class Boundary:
    """What a model returned in its last forward passes: where zeros can be sent back instead of a loss's gradients.

    A loss of one's own that divides 0 by 0 has gradients that are NaN, whatever they are multiplied by.
    """

    def __init__(self, module: nn.Module) -> None:
        self._outputs: list[Tensor] = []
        module.register_forward_hook(self._note)

    @property
    def is_known(self) -> bool:
        """Whether the model returned anything that has gradients."""
        return bool(self._outputs)

    def clear(self) -> None:
        """Forget what was returned."""
        self._outputs = []

    def nothing(self) -> Tensor:
        """A loss of 0 whose gradients are 0."""
        return torch.stack([(output * 0).sum() for output in self._outputs]).sum()

    def _note(self, _: nn.Module, __: Any, returned: Any) -> None:
        leaves = tree_leaves(returned)
        self._outputs += [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


@torch.no_grad()
def multiply(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place, whatever this rank holds of them."""
    held = [local(gradient) for gradient in gradients]
    dense = [gradient for gradient in held if not gradient.is_sparse]
    for device in dict.fromkeys(gradient.device for gradient in dense):
        torch._foreach_mul_([gradient for gradient in dense if gradient.device == device], factor.to(device))
    for gradient in held:
        if gradient.is_sparse:
            gradient.mul_(factor)


def weighted(loss: Tensor, weight: Tensor) -> Tensor:
    """Loss times weight, and the weight, shape (2,), float64."""
    return torch.stack([_or_nothing(loss, weight).double() * weight, weight.double()])


def _or_nothing(loss: Tensor, weight: Tensor) -> Tensor:
    """The loss; 0 in place of the mean over nothing, which is NaN."""
    return torch.where(weight != 0, loss, 0.0)


def _not_zero(weight: Tensor) -> Tensor:
    return torch.where(weight != 0, weight, 1.0)

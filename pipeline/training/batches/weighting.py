"""The loss of a step where losses are means over something other than samples, e.g. over tokens without padding.

Each micro-batch has a weight, the divisor of its loss. The step's loss is the sum of loss times weight divided by the
sum of the weights, over all micro-batches of all ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipeline.tasks import StepOutput
from pipeline.training.batches.order import MicroBatch
from pipeline.training.ranks.norms import local


class Denominator:
    """The divisor of the losses of an optimizer step: the sum of their weights.

    With one micro-batch for each rank it is known before the backward pass. With several, backward passes use an
    estimate from the first micro-batches, so that gradients are about as large as those of a mean (those of a sum would
    overflow in fp16), and the gradients are corrected once at the end.
    """

    def __init__(self, *, micro_batches: int, is_shared: bool, boundary: "Boundary | None") -> None:
        """Begin a step.

        Args:
            micro_batches: micro-batches of the step on each rank.
            is_shared: True if the divisor is summed over all ranks.
            boundary: boundary of the model, if gradients of NaN must be kept from it.
        """
        self._micro_batches, self._is_shared = micro_batches, is_shared
        self._boundary = boundary
        self._weights: list[Tensor] = []
        self._samples = 0.0
        self._likely = torch.ones(())

    def counted(self, output: StepOutput, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return a micro-batch's loss, 0 if it has no weight, and its factor. Collective if the divisor is shared."""
        assert output.weight is not None
        weight = output.weight * bool(micro_batch.weight)  # 0 for the padding of a rank without samples
        if not self._weights:
            self._likely = _not_zero(self._first(weight, micro_batch))
        self._weights.append(weight)
        self._samples += micro_batch.weight
        return self._loss(output.loss, weight, micro_batch), weight / self._likely

    def settle(self, loss: Tensor, *, gradients: Sequence[Tensor]) -> Tensor:
        """Correct the gradients after the last micro-batch; return the sum of losses, each divided by all weights."""
        if self._micro_batches == 1:
            return loss
        own = torch.stack(self._weights).sum()
        known = self._summed(own) if self._is_shared else own / (self._samples or 1)
        factor = self._likely / _not_zero(known)
        multiply(gradients, factor)
        return loss * factor

    def _first(self, weight: Tensor, micro_batch: MicroBatch) -> Tensor:
        """Estimate the sum of weights from the first micro-batch of each rank."""
        if self._is_shared:
            return self._summed(weight) * self._micro_batches
        return weight / (micro_batch.weight or 1)

    def _summed(self, weight: Tensor) -> Tensor:
        total = weight.clone()
        dist.all_reduce(total)
        return total

    def _loss(self, loss: Tensor, weight: Tensor, micro_batch: MicroBatch) -> Tensor:
        boundary = self._boundary
        if boundary is None or not boundary.is_known:
            return _or_nothing(loss, weight)
        is_empty = not micro_batch.weight or boundary.is_empty(weight)
        loss = boundary.nothing() if is_empty else _or_nothing(loss, weight)
        boundary.clear()  # the outputs would stay in memory during the backward pass
        return loss


class Boundary:
    """The model's outputs of the last forward passes, from which gradients of zero can replace those of a loss.

    A user's loss that divides 0 by 0 has gradients of NaN, which no factor can remove.
    """

    def __init__(self, module: nn.Module) -> None:
        self._outputs: list[Tensor] = []
        self._is_empty: bool | None = None
        module.register_forward_hook(self._note)

    @property
    def is_known(self) -> bool:
        """True if the model returned any tensor that requires gradients."""
        return bool(self._outputs)

    def clear(self) -> None:
        """Forget the outputs."""
        self._outputs = []

    def note_weight(self, weight: Tensor) -> None:
        """Note whether a task's weight is 0, if it is on the CPU."""
        self._is_empty = not weight if weight.is_cpu else None

    def is_empty(self, weight: Tensor) -> bool:
        """Return True if the weight is 0. The host waits for the device, unless the task returned it on the CPU."""
        return not weight if self._is_empty is None else self._is_empty

    def nothing(self) -> Tensor:
        """Return a loss of 0 whose gradients are 0."""
        return torch.stack([(output * 0).sum() for output in self._outputs]).sum()

    def _note(self, _: nn.Module, __: Any, returned: Any) -> None:
        leaves = tree_leaves(returned)
        self._outputs += [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


@torch.no_grad()
def multiply(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place: dense, sparse or this rank's shards."""
    held = [local(gradient) for gradient in gradients]
    dense = [gradient for gradient in held if not gradient.is_sparse]
    for device in dict.fromkeys(gradient.device for gradient in dense):
        torch._foreach_mul_([gradient for gradient in dense if gradient.device == device], factor.to(device))
    for gradient in held:
        if gradient.is_sparse:
            gradient.mul_(factor)


def weighted(values: Tensor, weight: Tensor) -> Tensor:
    """Return the weight, and values (values,) times weight, shape (1 + values,), float64."""
    return torch.cat([weight.double()[None], _or_nothing(values, weight).double() * weight])


def _or_nothing(loss: Tensor, weight: Tensor) -> Tensor:
    """Return the loss; 0 where the weight is 0, since the mean of an empty set is NaN."""
    return torch.where(weight != 0, loss, 0.0)


def _not_zero(weight: Tensor) -> Tensor:
    return torch.where(weight != 0, weight, 1.0)

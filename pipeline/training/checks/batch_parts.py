"""Losses of a batch and of its two parts, and the difference of their gradients."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from pipeline.training.batches.collation import Collation
from pipeline.training.context import TrainContext
from pipeline.training.model import gradient_hooks, learned
from pipeline.training.model.attributes_kept import attributes_kept
from pipeline.training.ranks.fingerprints import fingerprint
from pipeline.training.ranks.matmul_precision import set_exact_convolutions, set_matmul_precision
from pipeline.training.ranks.norms import total_norm
from pipeline.training.ranks.randomness import generators_kept, seed_all
from pipeline.training.step.forward import forward


class Loss(NamedTuple):
    """The loss and weight of a batch, or of a part of it."""

    value: float
    weight: float

    @property
    def sum(self) -> float:
        """Loss times weight; 0 for the mean of an empty set."""
        return self.value * self.weight if self.weight else 0.0


class Comparison(NamedTuple):
    """The losses of a batch and of its two parts; the random numbers of a loss that draws any are others in each."""

    whole: Loss
    first: Loss
    second: Loss
    gradients: float = 0.0
    """Norm of the batch's gradients less those of its parts, each times its weight, relative to the larger ones."""

    @property
    def excess(self) -> float:
        """Loss of the batch less those of its parts, each times its weight: of a mean 0, apart from noise."""
        return self.whole.sum - self.first.sum - self.second.sum


class GatheredRows:
    """Rows that a task gathers from a batch, which its parts get instead of the rows of other ranks."""

    def __init__(self) -> None:
        self.is_unlike = False
        """True if the task gathered something else than a row for each sample, equally often for each part."""
        self._whole: list[Tensor] = []

    def start(self, indices: range, *, of: int) -> None:
        """Start with these samples of a batch of so many."""
        self._indices, self._is_whole, self._calls = indices, len(indices) == of, 0

    def gathered(self, tensor: Tensor) -> Tensor:
        """Return the rows of the whole batch."""
        call, self._calls = self._calls, self._calls + 1
        if self._is_whole:
            self._whole[call : call + 1] = [tensor.detach()]
        if len(tensor) != len(self._indices) or call >= len(self._whole):
            self.is_unlike = True
            return tensor
        rows = self._whole[call].clone()
        rows[self._indices.start : self._indices.stop] = tensor
        return rows


class Parts:
    """A batch of samples, cut in two."""

    def __init__(self, context: TrainContext, module: nn.Module, samples: Sequence[int], *, rows: GatheredRows) -> None:
        self._context, self._module, self._rows = context, module, rows
        self._count, cut = len(samples), len(samples) // 2
        self._whole = range(self._count), context.batches.read(list(samples))
        collate, (_, batch), read = context.batches.collate(None), self._whole, context.batches.read
        self._is_cut = can_slice(collate, batch, samples, read=read)
        self.is_redrawn = not self._is_cut and is_redrawn(collate, batch, samples, read=read)
        """True if the parts have other random numbers of the collate function than the batch."""
        self._parts = [(indices, self._cut(indices, samples)) for indices in (range(cut), range(cut, self._count))]

    def draw(self, seed: int, *, differentiates: bool = False) -> Comparison:
        """Compute the losses, and the difference of the gradients if the loss has any. Collective if sharded."""
        gradients = _Gradients(self._context) if differentiates else None
        whole, first, second = (
            self._loss(indices, batch, seed=seed, add=gradients.adding(sign) if gradients else None)
            for (indices, batch), sign in zip([self._whole, *self._parts], (1, -1, -1), strict=True)
        )
        return Comparison(whole, first, second, gradients=gradients.difference if gradients else 0.0)

    def variation(self, *, differentiates: bool) -> tuple[float, float]:
        """Return how much the loss and the gradients of the whole batch differ under two seeds, relative to either."""
        gradients = _Gradients(self._context) if differentiates else None
        one, other = (
            self._loss(*self._whole, seed=seed, add=gradients.adding(sign) if gradients else None)
            for seed, sign in ((0, 1), (1, -1))
        )
        difference = abs(one.sum - other.sum) / max(abs(one.sum), abs(other.sum), 1e-30)
        return difference, gradients.difference if gradients else 0.0

    def loss(self, seed: int) -> Loss:
        """Compute the loss of the whole batch."""
        return self._loss(*self._whole, seed=seed)

    def _loss(self, indices: range, batch: Any, *, seed: int, add: Callable[[Tensor], None] | None = None) -> Loss:
        context = self._context
        self._rows.start(indices, of=self._count)
        seed_all(seed, device=context.device)
        with torch.set_grad_enabled(add is not None):
            output = forward(context, self._module, batch)
            loss = Loss(float(output.loss.detach()), len(indices) if output.weight is None else float(output.weight))
            if add is not None and loss.weight and output.loss.requires_grad:
                add(output.loss * loss.weight)
        return loss

    def _cut(self, indices: range, samples: Sequence[int]) -> Any:
        """Return some samples of the batch: sliced from it, or read again if a custom collate function made it."""
        if self._is_cut:
            return tree_map(lambda leaf: leaf[indices.start : indices.stop], self._whole[1])
        return self._context.batches.read([samples[index] for index in indices])


def is_redrawn(
    collate: Collation | None, batch: Any, samples: Sequence[int], *, read: Callable[[list[int]], Any]
) -> bool:
    """Return True if samples of a batch get other random numbers from the collate function when they are read again."""
    if collate is None:
        return False
    return collate.draws or fingerprint(read([*samples])) != fingerprint(batch)


def can_slice(
    collate: Collation | None, batch: Any, samples: Sequence[int], *, read: Callable[[list[int]], Any]
) -> bool:
    """Return True if parts of a batch are cut from it, else they are read.

    What a custom collate function makes may depend on the samples, such as the length that they are padded to. But one
    that draws random numbers would make other samples of them, e.g. with other tokens masked.
    """
    leaves = tree_leaves(batch)
    if not all(isinstance(leaf, Tensor) and leaf.ndim for leaf in leaves):
        return False
    if collate is None:
        return True
    if not leaves or any(len(leaf) != len(samples) for leaf in leaves):
        return False
    if collate.draws:
        return True
    turned = tree_leaves(read([*samples][::-1]))  # its last sample seeds the function
    return not all(
        leaf.shape == other.shape and torch.allclose(leaf.double(), other.flip(0).double(), rtol=1e-3, equal_nan=True)
        for leaf, other in zip(leaves, turned, strict=True)
    )


class _Gradients:
    """The gradients of a batch less those of its parts, in one copy."""

    def __init__(self, context: TrainContext) -> None:
        self._context = context
        self._parameters = [one for one in context.parameters if one.requires_grad]
        self._sums: list[Tensor | None] = [None] * len(self._parameters)
        self._norms: list[float] = []
        for parameter in self._parameters:
            parameter.grad = None

    @property
    def difference(self) -> float:
        """Norm of what is left, relative to the largest norm on the way; 0 if a gradient isn't finite."""
        if not self._norms or not all(map(isfinite, self._norms)) or not max(self._norms):
            return 0.0
        return self._norms[-1] / max(self._norms)

    def adding(self, sign: int) -> Callable[[Tensor], None]:
        """Return a function that adds the gradients of a loss, or subtracts them."""
        return lambda loss: self._add(sign * loss)

    def _add(self, loss: Tensor) -> None:
        if self._context.sharded is not None:  # whose gradients arrive in the parameters
            loss.backward()  # type: ignore[no-untyped-call]
            self._sums = [one.grad for one in self._parameters]
        else:  # without DDP's hooks on parameters
            found = torch.autograd.grad(loss, self._parameters, allow_unused=True)
            self._sums = [
                one if other is None else other if one is None else one + other
                for one, other in zip(self._sums, found, strict=True)
            ]
        own = [one for one in self._sums if one is not None]
        self._norms.append(float(total_norm(own, device=self._context.device)) if own else 0.0)


@contextmanager
def as_it_was(context: TrainContext) -> Iterator[nn.Module]:
    """Provide the model in evaluation mode and full precision; restore modes, buffers and generators after the block.

    Attributes are restored as well: a loss may count its calls. Gradients are cleared. Hooks on gradients
    are not called, unless the model is sharded, which has hooks itself.
    """
    module = context.wrapped if context.sharded is not None else context.model
    holders = (*module.modules(), context.task, getattr(context.task, "loss", None))
    buffers = [(one, one.clone()) for part in (module, learned.held_by(context.task)) for one in part.buffers()]
    modes = [(one, one.training) for one in module.modules()]
    module.eval()
    gpus = [context.device] if context.device.type == "cuda" else []
    hooks = nullcontext() if context.sharded is not None else gradient_hooks.silenced(context.whole)
    try:
        with (
            attributes_kept(holders),
            generators_kept(),
            torch.random.fork_rng(gpus),
            _eager(context),
            hooks,
            _full_precision(context),
        ):
            yield module
    finally:
        for one, training in modes:
            one.training = training
        with torch.no_grad():
            for buffer, values in buffers:
                buffer.copy_(values)
        for parameter in context.whole.parameters():
            parameter.grad = None


def has_16_bits(context: TrainContext) -> bool:
    """Return True if the model computes in 16 bits even without autocast."""
    if context.sharded is not None and context.strategy.compute_dtype is not None:
        return True
    return any(one.is_floating_point() and one.itemsize < 4 for one in context.whole.parameters())


def _eager(context: TrainContext) -> AbstractContextManager[object]:
    """Disable compilation for batches of these sizes."""
    return nullcontext() if context.built.compiling is None else torch.compiler.set_stance("force_eager")


@contextmanager
def _full_precision(context: TrainContext) -> Iterator[None]:
    """Compute in fp32 without TF32, whose rounding errors would hide small differences; or as the weights are."""
    context.autocasts = has_16_bits(context)
    recurs = any(isinstance(one, nn.RNNBase) for one in context.whole.modules())  # cuDNN's have no gradients then
    try:
        if context.device.type != "cuda":
            yield
            return
        with set_matmul_precision("highest"), set_exact_convolutions(enabled=not recurs):
            yield
    finally:
        context.autocasts = True

"""Loss and logs of a few samples, at once and in parts, as training or an evaluation computes them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_map

from pipeline.protocol.labels import Split
from pipeline.protocol.rank import Rank
from pipeline.tasks import OwnEvaluation
from pipeline.training.checks.batch_parts import can_slice, is_redrawn
from pipeline.training.checks.differing_samples import choose
from pipeline.training.context import TrainContext
from pipeline.training.ranks.randomness import seed_all
from pipeline.training.step.forward import forward

SAMPLES, PARTS = 8, 4
"""Samples that are computed at once, and the parts of them: pairs, since some values need more than one sample."""
_MOST_READ, _READING_S = 64, 0.5


class WholeAndParts(NamedTuple):
    """Values of a batch and of its parts: the loss, then the logs, in double precision."""

    whole: Tensor
    """Shape (values,)."""
    parts: Tensor
    """Shape (parts, values)."""
    weights: Tensor
    """Weights of the parts, shape (parts,)."""


class LoggedValues:
    """Loss and logs of samples of a set; of the training set, as training computes them, if ``split`` is None."""

    def __init__(self, context: TrainContext, module: nn.Module, *, split: Split | None) -> None:
        self._context, self._module, self._split = context, module, split
        self._read = context.batches.reader(split)
        self.groups = self._chosen()
        """Samples to compute at once: those that differ most first, then ordinary ones."""
        self.rounding = 0.0
        """Relative rounding error of the values' type."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the values: the loss, then the logs."""
        return ("loss", *(self._context.seen.log_names or ()))

    @property
    def is_redrawn(self) -> bool:
        """True if parts of a batch would have other random numbers of the collate function than the batch."""
        batches, samples, read = self._context.batches, self.groups[0], self._read
        if (collate := batches.collate(self._split)) is None:
            return False
        batch = read(samples)
        return not can_slice(collate, batch, samples, read=read) and is_redrawn(collate, batch, samples, read=read)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Let the task compute as in training or in the evaluation of the set."""
        context, split = self._context, self._split
        own: AbstractContextManager[object] = _training_mode(self._module) if split is None else nullcontext()
        if split is not None and isinstance(context.task, OwnEvaluation):
            own = context.task.own_evaluation(split)
        with context.other_logs(), own, torch.set_grad_enabled(split is None):  # some losses differentiate themselves
            yield

    def draw(self, group: int, seed: int) -> WholeAndParts:
        """Compute a group at once and in parts, in fewer ones if some of them have no weight."""
        samples = self.groups[group]
        batch = self._read(samples)
        whole, _ = self._values(batch, len(samples), seed)
        for count in (PARTS, 2):
            cuts = [part.tolist() for part in torch.arange(len(samples)).tensor_split(min(count, len(samples)))]
            parts = [self._values(self._cut(batch, samples, own), len(own), seed) for own in cuts]
            if all(weight for _, weight in parts):
                break
        return WholeAndParts(
            whole, torch.stack([values for values, _ in parts]), torch.tensor([weight for _, weight in parts])
        )

    def whole(self, group: int, seed: int) -> Tensor:
        """Compute a group at once."""
        return self._values(self._read(self.groups[group]), len(self.groups[group]), seed)[0]

    def _values(self, batch: Any, count: int, seed: int) -> tuple[Tensor, float]:
        context = self._context
        seed_all(seed, device=context.device)
        output = forward(context, self._module, batch)
        values = [output.loss, *(output.logs[name] for name in context.seen.log_names or ())]
        types = [value.dtype for value in values if value.is_floating_point()]
        self.rounding = max(self.rounding, *(torch.finfo(one).eps for one in types))
        weight = float(count) if output.weight is None else float(output.weight)
        found = torch.stack([value.detach().double().cpu() for value in values])
        return (found if weight else torch.zeros_like(found)), weight  # the mean of an empty set is NaN

    def _cut(self, batch: Any, samples: Sequence[int], own: Sequence[int]) -> Any:
        """Return some samples of the batch: sliced from it, or read again if a custom collate function made it."""
        collate = self._context.batches.collate(self._split)
        if can_slice(collate, batch, samples, read=self._read):
            return tree_map(lambda leaf: leaf[own[0] : own[-1] + 1], batch)
        return self._read([samples[index] for index in own])

    def _chosen(self) -> list[list[int]]:
        batches, split = self._context.batches, self._split
        readable = batches.count_readable(split)
        count = min(SAMPLES, readable)
        if count < 2:
            return [list(range(count))]
        if split is None:
            return [[index * (readable - 1) // max(count - 1, 1) for index in range(count)]]
        held_out = _HeldOut(batches.rank, readable, self._read)
        return choose(held_out, count=count, most=_MOST_READ, seconds=_READING_S)[:2]


@dataclass(frozen=True)
class _HeldOut:
    """A set to choose samples from."""

    rank: Rank
    readable: int
    read: Callable[[Sequence[int]], Any]


@contextmanager
def _training_mode(model: nn.Module) -> Iterator[None]:
    """Put modules into training mode inside the block, but those whose results would change."""
    changed = [one for one in model.modules() if not isinstance(one, _NormBase | _DropoutNd)]
    for module in changed:
        module.training = True
    try:
        yield
    finally:
        for module in changed:
            module.training = False

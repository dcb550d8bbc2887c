"""State that a task carries from batch to batch: truncated backpropagation through time.

After Williams and Peng 1990, "An efficient gradient-based algorithm for on-line training of recurrent network
trajectories" (doi 10.1162/neco.1990.2.4.490). Batches come in a `pipeline.training.order.ContiguousOrder`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from pipeline.errors import ExperimentError
from pipeline.protocol.trial import Rank
from pipeline.tasks import Task
from pipeline.training.collectives import gather
from pipeline.training.order import ContiguousOrder, MicroBatch, SampleOrder


class CarriedState:
    """State of this rank's rows at the end of their latest chunks, detached, on the device.

    It knows which chunk comes next, and belongs to no other: rows begin without a state in each epoch, in each
    evaluation, and in steps that are only measured.
    """

    def __init__(self, *, batch_dim: int, stream_length: int, copies: bool = False) -> None:
        """Begin without a state.

        Args:
            batch_dim: dimension of the state's tensors that counts the rows.
            stream_length: samples of each stream.
            copies: True if the next forward pass overwrites what the last one returned, as CUDA graphs do.
        """
        self.batch_dim = batch_dim
        self._length, self._copies = stream_length, copies
        self.reset()

    def reset(self) -> None:
        """Begin without a state."""
        self._rows: Any = None
        self._before: Any = None  # what the last step continued
        self._next = (-1, 0)  # epoch and chunk that the rows are continued by
        self._parts: list[Any] = []  # states of the micro-batches of this step so far
        self._taken, self._at = 0, (-1, 0)  # their rows, and the epoch and chunk of the step

    def of(self, micro_batch: MicroBatch) -> Any:
        """Return the state that a micro-batch's rows continue; None at their beginning."""
        if not (micro_batch.weight and micro_batch.indices):  # the padding of a sharded strategy
            return None
        if self._at != (position := self._position(micro_batch)):
            self._parts, self._taken, self._at = [], 0, position
        if position != self._next or self._rows is None:
            return None
        count = len(micro_batch.indices)
        own = (self.batch_dim, self._taken, count)
        return tree_map(lambda leaf: leaf.narrow(*own).contiguous(), self._rows)  # as cuDNN asks for

    def keep(self, micro_batch: MicroBatch, state: Any) -> None:
        """Keep the state at the end of a micro-batch, of which `of` was called.

        Raises:
            ExperimentError: the task returned no state, or one that doesn't count the rows.
        """
        if not (micro_batch.weight and micro_batch.indices):
            return
        _check(state, rows=len(micro_batch.indices), batch_dim=self.batch_dim)
        self._parts.append(tree_map(lambda leaf: leaf.detach().clone() if self._copies else leaf.detach(), state))
        self._taken += len(micro_batch.indices)
        if micro_batch.is_last:
            epoch, chunk = self._at
            self._before, self._next = self._rows if self._at == self._next else None, (epoch, chunk + 1)
            self._rows = _joined(self._parts, dim=self.batch_dim)
            self._at = (-1, 0)

    def revert(self) -> None:
        """Return to the state before the last step, which was skipped: its own may be NaN."""
        self._rows = self._before

    def _position(self, micro_batch: MicroBatch) -> tuple[int, int]:
        """Return the epoch and chunk of a micro-batch; all its rows are at the same chunk of their streams."""
        return micro_batch.epoch, micro_batch.indices[0] % self._length

    def gathered(self, rank: Rank) -> Mapping[str, Any]:
        """Return the state of all ranks in the order of the global batch's rows, on the CPU. Collective."""
        if self._rows is None:  # on all ranks
            return {"next": list(self._next), "rows": []}
        parts = gather(tree_map(Tensor.cpu, self._rows), rank=rank)
        rows = tree_map(lambda *leaves: _dealt_back(leaves, dim=self.batch_dim), *parts)
        return {"next": list(self._next), "rows": [rows]}

    def load(self, saved: Mapping[str, Any], *, rank: Rank, device: torch.device) -> None:
        """Load this rank's rows of what `gathered` returned, at any world size."""
        self.reset()
        self._next = (saved["next"][0], saved["next"][1])

        def own(leaf: Tensor) -> Tensor:
            rows = torch.arange(rank.rank, leaf.shape[self.batch_dim], rank.world_size)
            return leaf.index_select(self.batch_dim, rows).to(device)

        self._rows = next((tree_map(own, rows) for rows in saved["rows"]), None)


def carried_by(task: Task, order: SampleOrder, *, samples: int, copies: bool = False) -> CarriedState | None:
    """Return what a task is to carry over a set of ``samples``; None for a task without a state."""
    if not isinstance(order, ContiguousOrder) or not hasattr(task, "batch_dim"):
        return None
    return CarriedState(batch_dim=task.batch_dim, stream_length=order.stream_length(samples), copies=copies)


def _check(state: Any, *, rows: int, batch_dim: int) -> None:
    """Refuse a state whose rows can't be told apart, or that a checkpoint couldn't restore."""
    if type(state) in (tuple, list, dict):
        for part in state.values() if isinstance(state, dict) else state:
            _check(part, rows=rows, batch_dim=batch_dim)
    elif not isinstance(state, Tensor):
        raise ExperimentError.of(
            "task",
            f"has a batch_dim, but StepOutput.state is or holds a {type(state).__name__}; return a tensor, or tuples, "
            "lists and dicts of tensors",
        )
    elif not -state.ndim <= batch_dim < state.ndim or state.shape[batch_dim] != rows:
        raise ExperimentError.of(
            "task",
            f"returned a StepOutput.state of shape {tuple(state.shape)} for a batch of {rows} rows; dimension "
            f"{batch_dim}, its batch_dim, must count them",
        )


def _joined(parts: list[Any], *, dim: int) -> Any:
    if len(parts) == 1:
        return parts[0]
    return tree_map(lambda *leaves: torch.cat(leaves, dim), *parts)


def _dealt_back(leaves: tuple[Tensor, ...], *, dim: int) -> Tensor:
    """Interleave the rows of all ranks, which were dealt like cards."""
    shape = list(leaves[0].shape)
    shape[dim] = sum(leaf.shape[dim] for leaf in leaves)
    whole = leaves[0].new_empty(shape)
    for number, leaf in enumerate(leaves):
        whole.movedim(dim, 0)[number :: len(leaves)] = leaf.movedim(dim, 0)
    return whole

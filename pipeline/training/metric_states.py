"""Merging of metrics' list states over the ranks, which torchmetrics itself gathers only for equal lengths."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from pipeline.protocol.trial import Rank
from pipeline.training.collectives import gather

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection

Place = tuple[int, str]
"""A list state: its metric's number in the collection, and its name."""


class _Shape(NamedTuple):
    """Type and shape to restore a tensor from bytes."""

    dtype: torch.dtype
    shape: torch.Size

    @property
    def bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def read(self, data: Tensor) -> Tensor:
        return data.clone().view(self.dtype).reshape(self.shape)  # a copy, for its alignment


def merge_lists(metrics: "MetricCollection", *, rank: Rank) -> None:
    """Give every rank the list elements of all ranks, in rank order. Collective.

    torchmetrics gathers element by element: ranks with different numbers of batches would abort or hang. Tensor
    states, such as sums, are left to it.
    """
    if rank.world_size == 1:
        return
    each = _each(metrics)
    lists = {(number, name): state for number, one in enumerate(each) for name, state in _lists(one).items()}
    if not lists:
        return
    numbers = {id(state): index for index, state in enumerate({id(state): state for state in lists.values()}.values())}
    shared = {numbers[id(state)]: state for state in lists.values()}  # metrics that share a state send it once
    parts = _gathered_lists({place: numbers[id(state)] for place, state in lists.items()}, shared, each, rank=rank)
    for (number, name), merged in parts.items():
        one = each[number]
        device = torch.device("cpu") if one.compute_on_cpu else one.device
        setattr(one, name, tree_map_only(Tensor, partial(Tensor.to, device=device), merged))
    for number, one in enumerate(each):
        if count := sum(place[0] == number for place in lists):
            _gather_the_rest(one, is_all=count == len(one.metric_state))


def _gathered_lists(
    places: Mapping[Place, int], shared: Mapping[int, list[Any]], each: "list[Metric]", *, rank: Rank
) -> dict[Place, list[Any]]:
    """Gather the elements of all ranks by place; structure and strings are sent as objects, tensors as bytes."""
    leaves, spec = tree_flatten(dict(shared))
    tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
    told = [_Shape(leaf.dtype, leaf.shape) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    parts = gather((places, spec, told), rank=rank)
    sizes = [[leaf.bytes for leaf in told if isinstance(leaf, _Shape)] for _, _, told in parts]
    data = _bytes(tensors, device=each[0].device, sizes=list(map(sum, sizes)))
    merged: dict[Place, list[Any]] = {place: [] for place in places}
    for (theirs, spec, told), own, lengths in zip(parts, data, sizes, strict=True):
        pieces = iter(torch.split(own, lengths))
        restored = [leaf.read(next(pieces)) if isinstance(leaf, _Shape) else leaf for leaf in told]
        states = tree_unflatten(restored, spec)
        for place, index in theirs.items():
            merged[place] += states[index]
    return merged


def _bytes(tensors: list[Tensor], *, device: torch.device, sizes: list[int]) -> list[Tensor]:
    """Gather each rank's tensors, concatenated as bytes."""
    flat = [one.to(device).contiguous().reshape(-1).view(torch.uint8) for one in tensors]
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    if flat:
        own = torch.cat(flat)
        padded[: len(own)] = own
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return [part[:size] for part, size in zip(parts, sizes, strict=True)]


def _each(metrics: "MetricCollection") -> "list[Metric]":
    """List all metrics, also those inside wrappers, in the same order on all ranks."""
    from torchmetrics import Metric

    for _ in metrics.items(copy_state=False):
        """Iterating updates the metrics that share states."""
    return [module for module in metrics.modules() if isinstance(module, Metric)]


def _lists(metric: "Metric") -> Mapping[str, list[Any]]:
    return {name: state for name, state in metric.metric_state.items() if isinstance(state, list)}


def _gather_the_rest(metric: "Metric", *, is_all: bool) -> None:
    """Make a metric gather its tensor states only; nothing if all of its states are lists (``is_all``)."""
    if is_all:
        metric.distributed_available_fn = _is_not_distributed
    else:
        metric.dist_sync_fn = partial(_gathered, metric)


def _is_not_distributed() -> bool:
    return False


def _gathered(metric: "Metric", tensor: Tensor, group: Any = None) -> list[Tensor]:
    """Gather a tensor state from all ranks; return the tensor itself if it belongs to a merged list."""
    from torchmetrics.utilities.distributed import gather_all_tensors

    if any(tensor is state for state in metric.metric_state.values()):
        return list(gather_all_tensors(tensor, group))
    return [tensor]

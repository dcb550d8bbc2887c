"""Merge what ranks have collected in metrics' list states, before the metrics are computed."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from pipeline.contract import Rank
from pipeline.training.collective import gather

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection

Lists = dict[tuple[int, str], list[Any]]
"""Elements of list states, by the metric's place in its collection and the state's name."""


def merge_lists(metrics: "MetricCollection", *, rank: Rank) -> None:
    """Give every rank the elements of all ranks, in rank order. Collective.

    torchmetrics gathers element by element, so a rank with fewer batches than another, or with none, would end in an
    abort or wait for ever. Tensor states, which are sums and the like, it still gathers itself.
    """
    if rank.world_size == 1:
        return
    listed = {place: states for place, one in enumerate(_each(metrics)) if (states := _lists(one))}
    if not listed:
        return
    memo: dict[int, list[Any]] = {}  # metrics that share their states send them once
    own: Lists = {
        (place, name): memo.setdefault(id(elements), apply_to_collection(elements, Tensor, _copied))
        for place, states in listed.items()
        for name, elements in states.items()
    }
    parts = gather(own, rank=rank)
    for place, one in enumerate(_each(metrics)):
        for name in listed.get(place, ()):
            merged = [element for part in parts for element in part[place, name]]
            device = torch.device("cpu") if one.compute_on_cpu else one.device
            setattr(one, name, apply_to_collection(merged, Tensor, partial(Tensor.to, device=device)))
        if place in listed:
            _gather_the_rest(one, is_all=len(listed[place]) == len(one.metric_state))


def _each(metrics: "MetricCollection") -> "list[Metric]":
    """All metrics, those inside of wrappers too, in the same order on all ranks."""
    from torchmetrics import Metric

    for _ in metrics.items(copy_state=False):
        """Metrics that share their states see the newest."""
    return [module for module in metrics.modules() if isinstance(module, Metric)]


def _lists(metric: "Metric") -> Mapping[str, list[Any]]:
    return {name: state for name, state in metric.metric_state.items() if isinstance(state, list)}


def _copied(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, without the rest of a storage of which it is a part."""
    return tensor.detach().cpu().clone()


def _gather_the_rest(metric: "Metric", *, is_all: bool) -> None:
    """Tell a metric to gather nothing, if ``is_all`` that it has, or its tensor states only."""
    if is_all:
        metric.distributed_available_fn = _is_not_distributed
    else:
        metric.dist_sync_fn = partial(_gathered, metric)


def _is_not_distributed() -> bool:
    return False


def _gathered(metric: "Metric", tensor: Tensor, group: Any = None) -> list[Tensor]:
    """All ranks' values of a tensor state; of a merged list, which all ranks have, the tensor itself."""
    from torchmetrics.utilities.distributed import gather_all_tensors

    if any(tensor is state for state in metric.metric_state.values()):
        return list(gather_all_tensors(tensor, group))
    return [tensor]

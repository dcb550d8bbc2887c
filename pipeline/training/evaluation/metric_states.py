"""Merging of metrics' states over the ranks, which torchmetrics itself gathers only for equal types and lengths."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise, zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from pipeline.protocol.rank import Rank
from pipeline.training.ranks.collectives import gather
from pipeline.training.ranks.fingerprints import fingerprint

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection

_Reduction = Callable[[Any], Any]
_OF_PROBABILITIES = frozenset(("MulticlassPrecisionRecallCurve", "MulticlassCalibrationError", "MulticlassHingeLoss"))
"""torchmetrics' classes of metrics of probabilities, and bases of such classes."""
_OF_METRICS = frozenset(("training", "update", "compute", "sync_on_compute"))
"""Public attributes that torchmetrics sets."""


class SharedMetrics:
    """Metrics of this rank's samples, and of all samples once they are merged.

    Metrics whose states can't be merged exactly (tensors that torchmetrics stacks, or averages over ranks) get the
    outputs and targets of all ranks.
    """

    def __init__(self, metrics: "MetricCollection", *, rank: Rank, copies: bool = False) -> None:
        """Start with metrics that have no state yet; ``copies`` if the next batch overwrites what they get."""
        self._metrics, self._rank, self._copies = metrics, rank, copies
        self._lists = ListLengths(metrics, rank=rank)
        self._inputs: dict[str, list[Any]] = {}
        self._guessing = [name for name, one in metrics.items(copy_state=False) if _guesses(one)]
        self._has = torch.zeros(2, dtype=torch.bool)  # a batch with outputs from 0 to 1 only, and another batch
        self.ambiguous: Sequence[str] = ()
        """Metrics that took some batches for probabilities and others for logits; known after `merge`."""

    def update(self, outputs: Any, targets: Any) -> None:
        """Update all metrics with a batch, 16-bit floats converted to fp32."""
        given = in_full_precision((outputs, targets), copies=self._copies)
        self._metrics.update(*given)
        if self._guessing and isinstance(outputs, Tensor) and outputs.is_floating_point():
            is_outside = ((outputs < 0) | (outputs > 1)).any()
            self._has = self._has.to(outputs.device) | torch.stack([~is_outside, is_outside])
        if self._rank.world_size == 1:
            return
        self._lists.note()
        for name, metric in self._metrics.items(copy_state=False):
            if not all(map(_is_mergeable, _each(metric))):
                self._inputs.setdefault(name, []).append(given)

    def merge(self) -> None:
        """Give the metrics of every rank all samples, in the order of the set. Collective."""
        if self._guessing:
            found = gather(self._has.tolist(), rank=self._rank)
            self.ambiguous = self._guessing if all(any(column) for column in zip(*found, strict=True)) else ()
        if self._rank.world_size == 1:
            return
        parts = _gathered(self._inputs, device=_each(self._metrics)[0].device, rank=self._rank)
        with_inputs = set().union(*parts)
        metrics = dict(self._metrics.items(copy_state=False))
        self._lists.merge(nn.ModuleList(metric for name, metric in metrics.items() if name not in with_inputs))
        for name in sorted(with_inputs):
            metrics[name].reset()
            for given in _in_turn(part.get(name, ()) for part in parts):
                metrics[name].update(*given)
        compute_alone(self._metrics)


def _guesses(metric: nn.Module) -> bool:
    """Return True if torchmetrics guesses in each batch whether outputs are probabilities or logits.

    See its `normalize_logits_if_needed`; metrics of several classes that only compare outputs don't need to know.
    """
    names = {one.__name__ for one in type(metric).__mro__ if one.__module__.startswith("torchmetrics.classification")}
    return any(name.startswith(("Binary", "Multilabel")) or name in _OF_PROBABILITIES for name in names)


def in_full_precision(values: tuple[Any, Any], *, copies: bool = False) -> tuple[Any, Any]:
    """Convert 16-bit floats among a batch's outputs and targets to fp32, in which metrics accumulate.

    With ``copies`` no tensor shares memory with the given one.
    """

    def converted(tensor: Tensor) -> Tensor:
        is_short = tensor.is_floating_point() and tensor.dtype.itemsize < 4
        return tensor.to(torch.float32 if is_short else tensor.dtype, copy=copies)

    outputs, targets = tree_map_only(Tensor, converted, values)
    return outputs, targets


def compute_alone(metrics: nn.Module) -> None:
    """Keep all metrics in a module from gathering states of other ranks when they compute."""
    for one in _each(metrics):
        one.distributed_available_fn = _is_not_distributed


class ListLengths:
    """Lengths of metrics' list states after each batch, by which the lists of all ranks are merged in sample order."""

    def __init__(self, metrics: nn.Module, *, rank: Rank) -> None:
        """Start with the lists of all metrics in a module as they are."""
        self._rank = rank
        self._metrics = _each(metrics) if rank.world_size > 1 else []
        self._ends: dict[int, dict[str, list[int]]] = {id(one): {} for one in self._metrics}
        self.note()

    def note(self) -> None:
        """Note the lengths after a batch."""
        for one in self._metrics:
            for name, state in one.metric_state.items():
                if isinstance(state, list):
                    self._ends[id(one)].setdefault(name, []).append(len(state))

    def merge(self, metrics: nn.Module) -> None:
        """Give some of the metrics the states of all ranks. Collective.

        torchmetrics gathers tensor by tensor: ranks with other numbers of batches would abort or hang, and so would a
        rank without samples, whose states still have their first type. A rank without samples contributes nothing.
        """
        each = _each(metrics)
        if self._rank.world_size == 1 or not each:
            return
        own = [(one.update_count, dict(one.metric_state), self._ends[id(one)]) for one in each]
        parts = _gathered(own, device=each[0].device, rank=self._rank)
        for one, *states in zip(each, *parts, strict=True):
            _take_over(one, [_State(*state) for state in states])
        compute_alone(metrics)


class _State(NamedTuple):
    """State of a metric on one rank."""

    updates: int
    values: Mapping[str, Any]
    ends: Mapping[str, Sequence[int]]
    """Lengths of lists by name, at first and after each batch."""

    def batches(self, name: str) -> list[list[Any]]:
        """Return the elements of a list: those at first, and those that each batch added."""
        return [self.values[name][start:end] for start, end in pairwise((0, *self.ends[name]))]


class _Shape(NamedTuple):
    """Type and shape to restore a tensor from bytes."""

    dtype: torch.dtype
    shape: torch.Size

    @property
    def bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def read(self, data: Tensor) -> Tensor:
        return data.clone().view(self.dtype).reshape(self.shape)  # a copy, for its alignment


def _each(metrics: nn.Module) -> "list[Metric]":
    """List all metrics in a module, also those inside wrappers, in the same order on all ranks."""
    from torchmetrics import Metric

    # isinstance would take 0.3 s once: for another class Python's ABC asks each subclass of Metric.
    return [cast("Metric", module) for module in metrics.modules() if Metric in type(module).__mro__]


def _is_mergeable(metric: "Metric") -> bool:
    """Return False if a metric that has been updated has tensors without an exact reduction over ranks.

    A mean over ranks is exact for a constant, such as the range of the data, which keeps its default.
    """
    from torchmetrics.utilities import dim_zero_mean

    for name, default in metric._defaults.items():
        reduction = metric._reductions[name]
        if not isinstance(default, Tensor):
            continue
        if reduction is None:
            return False
        if reduction is dim_zero_mean and not torch.equal(getattr(metric, name).cpu(), default.cpu()):
            return False
    return True


def _take_over(metric: "Metric", states: Sequence[_State]) -> None:
    """Set a metric's states to those of all ranks."""
    given = [state for state in states if state.updates] or states
    for name, reduction in metric._reductions.items():
        merged = given[0].values[name] if len(given) == 1 else _merged(given, name, reduction)
        device = torch.device("cpu") if isinstance(merged, list) and metric.compute_on_cpu else metric.device
        setattr(metric, name, tree_map_only(Tensor, partial(Tensor.to, device=device), merged))
    metric._update_count = sum(state.updates for state in states)


def _merged(states: Sequence[_State], name: str, reduction: _Reduction | None) -> Any:
    """Merge a state of several ranks: lists batch by batch, tensors as torchmetrics reduces them."""
    from torchmetrics.utilities import dim_zero_cat

    parts = [state.values[name] for state in states]
    if isinstance(parts[0], list):
        return list(chain.from_iterable(_in_turn(state.batches(name) for state in states)))
    if reduction is None:
        return torch.stack(parts)
    return reduction(parts if reduction is dim_zero_cat else torch.stack(parts))


def _in_turn(parts: Iterable[Iterable[Any]]) -> list[Any]:
    """Return the first element of each part, then the second of each, and so on."""
    missing = object()
    return [one for row in zip_longest(*parts, fillvalue=missing) for one in row if one is not missing]


def _gathered(own: Any, *, device: torch.device, rank: Rank) -> list[Any]:
    """Gather nested values of all ranks; structure and strings are sent as objects, tensors as bytes."""
    leaves, spec = tree_flatten(own)
    tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
    described = [_Shape(leaf.dtype, leaf.shape) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    parts = gather((spec, described), rank=rank)
    sizes = [[leaf.bytes for leaf in theirs if isinstance(leaf, _Shape)] for _, theirs in parts]
    data = _bytes(tensors, device=device, sizes=list(map(sum, sizes)))
    gathered: list[Any] = []
    for (spec, theirs), sent, lengths in zip(parts, data, sizes, strict=True):
        pieces = iter(torch.split(sent, lengths))
        restored = [leaf.read(next(pieces)) if isinstance(leaf, _Shape) else leaf for leaf in theirs]
        gathered.append(tree_unflatten(restored, spec))
    return gathered


def _bytes(tensors: list[Tensor], *, device: torch.device, sizes: list[int]) -> list[Tensor]:
    """Gather each rank's tensors, concatenated as bytes."""
    # Clones, since a view or an expanded tensor of a single element counts as contiguous, whatever its strides.
    copies = (one.to(device).clone(memory_format=torch.contiguous_format) for one in tensors)
    flat = [one.reshape(-1).view(torch.uint8) for one in copies]
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    if flat:
        own = torch.cat(flat)
        padded[: len(own)] = own
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return [part[:size] for part, size in zip(parts, sizes, strict=True)]


def _is_not_distributed() -> bool:
    return False


def unmergeable(metric: "Metric", *, before: Mapping[str, str]) -> str:
    """Return what of a user's metric workers would not merge; empty if there is nothing."""
    if hidden := [key for key, value in vars(metric).items() if key != "_modules" and _holds_metrics(value)]:
        return f"has metrics in the list or dict {', '.join(hidden)}. Put them into torch.nn.ModuleList or ModuleDict."
    if changed := [key for key, value in attributes_outside_states(metric).items() if before.get(key) != value]:
        return (
            f"updates {', '.join(changed)}, which is not merged over workers. Declare it with "
            "add_state(..., dist_reduce_fx=...)."
        )
    return ""


def _holds_metrics(value: object) -> bool:
    """Return True for a plain container with metrics, which can't be found and would wait for other ranks."""
    from torchmetrics import Metric

    inner: Iterable[object] = ()
    if type(value) in (dict, list, tuple):
        inner = value.values() if isinstance(value, dict) else cast("Iterable[object]", value)
    return any(Metric in type(one).__mro__ for one in inner)


def attributes_outside_states(metric: "Metric") -> dict[str, str]:
    """Return fingerprints of the public attributes of a user's metric besides its states; none of torchmetrics' own."""
    if type(metric).__module__.partition(".")[0] == "torchmetrics":
        return {}
    return {
        key: fingerprint(value)
        for key, value in vars(metric).items()
        if not key.startswith("_") and key not in metric._defaults and key not in _OF_METRICS
    }

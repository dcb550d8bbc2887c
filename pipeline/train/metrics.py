"""Metrics: building them, the direction that is better, merging their states over ranks, and what they compute."""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise, product, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from pipeline.errors import ExperimentError, Problem
from pipeline.experiment.reported import source_of
from pipeline.experiment.values import Component, Create, Direction, Mode
from pipeline.protocol.rank import Rank
from pipeline.train.ranks import gather
from pipeline.train.same import fingerprint

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection

_MOST_LABELLED = 20
_MOST_VALUES = 1000
"""Values of a metric that are numbers of each evaluation; results with more are files of the last one."""
_OF_PROBABILITIES = frozenset(("MulticlassPrecisionRecallCurve", "MulticlassCalibrationError", "MulticlassHingeLoss"))
"""torchmetrics' classes of metrics of probabilities, and bases of such classes."""
_OF_METRICS = frozenset(("training", "update", "compute", "sync_on_compute"))
"""Public attributes that torchmetrics sets."""


# Building


def build(create: Create, components: Mapping[str, Component]) -> "dict[str, Metric]":
    """Build metrics by name. Without metrics, torchmetrics is not imported.

    Raises:
        ExperimentError: some can't be built or are not of torchmetrics; lists all of these.
    """
    built: dict[str, Metric] = {}
    problems: list[Problem] = []
    for name, component in components.items():
        try:
            built[name] = _check_metric(create(component, key=f"metrics.{name}"), name=name)
        except ExperimentError as error:
            problems += error.problems
    if problems:
        raise ExperimentError(problems)
    return built


def build_collection(
    create: Create, components: Mapping[str, Component], *, device: torch.device
) -> "MetricCollection":
    """Build metrics by name as a collection on the device; see `build` for errors."""
    from torchmetrics import MetricCollection  # slow to import, and not needed by measurements

    # Groups would merge metrics of one class for ever if their states are equal after the first batch.
    return MetricCollection(dict(build(create, components)), compute_groups=False).to(device)


def _check_metric(metric: Any, *, name: str) -> "Metric":
    from torchmetrics import Metric, MetricCollection

    if not isinstance(metric, Metric):
        message = f"is a {type(metric).__name__}; use a torchmetrics metric, which is correct across ranks"
        raise ExperimentError.of(f"metrics.{name}", message)
    try:
        MetricCollection({name: metric})
    except KeyError as error:  # a name that its class uses itself, such as "train", or one with a dot
        message = f"torchmetrics refuses this name: {error.args[0]}; use another"
        raise ExperimentError.of(f"metrics.{name}", message) from error
    return metric


def direction(metric: str, mode: Mode, *, key: str, judges: Mapping[str, Any]) -> Direction:
    """Resolve ``mode: auto`` of a section by torchmetrics' ``higher_is_better``; a smaller loss is better.

    ``key`` names the metric, e.g. "checkpoint.best"; ``judges`` are metrics or their classes, by name.

    Raises:
        ExperimentError: the metric doesn't say which direction is better.
    """
    if mode != "auto":
        return mode
    if (known := known_direction(metric, judges=judges)) is None:
        judge = judges.get(source_of(metric, judges) or "")
        kind = judge.__name__ if isinstance(judge, type) else type(judge).__name__
        section = key.rpartition(".")[0]
        message = f"{kind} does not declare whether higher {metric} is better. Set {section}.mode to max or min."
        raise ExperimentError.of(key, message)
    return known


def known_direction(metric: str, *, judges: Mapping[str, Any]) -> Direction | None:
    """Return the direction in which a metric is better; None if its class does not have one, see `direction`."""
    source = source_of(metric, judges)
    if source == "loss":
        return "min"
    higher_is_better = getattr(judges.get(source or ""), "higher_is_better", None)
    return ("max" if higher_is_better else "min") if isinstance(higher_is_better, bool) else None


# Updating them on all ranks


class SharedMetrics:
    """Metrics of this rank's samples, and of all samples once they are merged.

    Metrics whose states can't be merged exactly (tensors that torchmetrics stacks, or averages over ranks) get the
    outputs and targets of all ranks.
    """

    def __init__(self, metrics: "MetricCollection", *, rank: Rank, copies: bool = False) -> None:
        """Start with the states that the metrics have; ``copies`` if the next batch overwrites what they get."""
        self._metrics, self._rank, self._copies = metrics, rank, copies
        self._named: dict[str, Metric] = dict(metrics.items(copy_state=False))
        self._lists = ListLengths(metrics, rank=rank)
        self._inputs: dict[str, list[Any]] = {}
        self._guessing = [name for name, one in self._named.items() if _is_guessing(one)]
        self._has = torch.zeros(2, dtype=torch.bool)  # a batch with outputs from 0 to 1 only, and another batch
        self.ambiguous: Sequence[str] = ()
        """Metrics that took some batches for probabilities and others for logits; known after `merge`."""

    def update(self, outputs: Any, targets: Any) -> None:
        """Update all metrics with a batch, 16-bit floats converted to fp32."""
        given = convert_to_full_precision((outputs, targets), copies=self._copies)
        self._metrics.update(*given)
        if self._guessing and isinstance(outputs, Tensor) and outputs.is_floating_point():
            is_outside = ((outputs < 0) | (outputs > 1)).any()
            self._has = self._has.to(outputs.device) | torch.stack([~is_outside, is_outside])
        if self._rank.world_size == 1:
            return
        self._lists.note()
        for name, metric in self._named.items():
            if not all(map(_is_mergeable, _each(metric))):
                self._inputs.setdefault(name, []).append(given)

    def merge(self) -> None:
        """Give the metrics of every rank all samples, in the order of the set. Collective."""
        if self._guessing:
            found = gather(self._has.tolist(), rank=self._rank)
            self.ambiguous = self._guessing if all(any(column) for column in zip(*found, strict=True)) else ()
        if self._rank.world_size == 1:
            return
        parts = _gather_states(self._inputs, rank=self._rank)
        with_inputs = set().union(*parts)
        self._lists.merge(nn.ModuleList(one for name, one in self._named.items() if name not in with_inputs))
        for name in sorted(with_inputs):
            metric = self._named[name]
            metric.reset()
            for given in _alternate(part.get(name, ()) for part in parts):
                metric.update(*tree_map_only(Tensor, partial(Tensor.to, device=metric.device), given))
        compute_alone(self._metrics)

    def read(self) -> "Readings":
        """Return what the metrics compute, of all samples once they are merged.

        Raises:
            ExperimentError: some results are neither numbers nor curves.
        """
        return read(self._metrics.compute(), self._named)


def _is_guessing(metric: nn.Module) -> bool:
    """Return True if torchmetrics guesses in each batch whether outputs are probabilities or logits.

    See its `normalize_logits_if_needed`; metrics of several classes that only compare outputs don't need to know.
    """
    names = {one.__name__ for one in type(metric).__mro__ if one.__module__.startswith("torchmetrics.classification")}
    return any(name.startswith(("Binary", "Multilabel")) or name in _OF_PROBABILITIES for name in names)


def convert_to_full_precision(values: tuple[Any, Any], *, copies: bool = False) -> tuple[Any, Any]:
    """Convert 16-bit floats among a batch's outputs and targets to fp32; with ``copies`` share no memory with them."""

    def converted(tensor: Tensor) -> Tensor:
        is_short = tensor.is_floating_point() and tensor.dtype.itemsize < 4
        return tensor.to(torch.float32 if is_short else tensor.dtype, copy=copies)

    outputs, targets = tree_map_only(Tensor, converted, values)
    return outputs, targets


def compute_alone(metrics: nn.Module) -> None:
    """Keep all metrics in a module from gathering states of other ranks when they compute."""
    for one in _each(metrics):
        one.distributed_available_fn = _is_not_distributed


def _is_not_distributed() -> bool:
    return False


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
        for one, *ranks in zip(each, *_gather_states(own, rank=self._rank), strict=True):
            given = [state for state in ranks if state[0]] or ranks
            for name, reduction in one._reductions.items():
                ends = [state[2].get(name, ()) for state in given]
                merged = _merge_states([state[1][name] for state in given], ends, reduction)
                device = torch.device("cpu") if isinstance(merged, list) and one.compute_on_cpu else one.device
                setattr(one, name, tree_map_only(Tensor, partial(Tensor.to, device=device), merged))
            one._update_count = sum(state[0] for state in ranks)
        compute_alone(metrics)


def _merge_states(parts: list[Any], ends: list[Sequence[int]], reduction: Callable[[Any], Any] | None) -> Any:
    """Merge a state of several ranks: lists batch by batch, tensors as torchmetrics reduces them."""
    from torchmetrics.utilities import dim_zero_cat

    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], list):
        batches = [[part[a:b] for a, b in pairwise((0, *cuts))] for part, cuts in zip(parts, ends, strict=True)]
        return list(chain.from_iterable(_alternate(batches)))
    if reduction is None:
        return torch.stack(parts)
    return reduction(parts if reduction is dim_zero_cat else torch.stack(parts))


def _alternate(parts: Iterable[Iterable[Any]]) -> list[Any]:
    """Return the first element of each part, then the second of each, and so on."""
    missing = object()
    return [one for row in zip_longest(*parts, fillvalue=missing) for one in row if one is not missing]


def _gather_states(own: Any, *, rank: Rank) -> list[Any]:
    """Gather nested values of all ranks, with their tensors on the CPU."""

    def copied(tensor: Tensor) -> Tensor:  # with a view, all that it is a view of would be sent
        return tensor.detach().clone(memory_format=torch.contiguous_format).cpu()

    return gather(tree_map_only(Tensor, copied, own), rank=rank)


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
        reduction = metric._reductions[name] if isinstance(default, Tensor) else "of a list"
        if reduction is dim_zero_mean and not torch.equal(getattr(metric, name).cpu(), default.cpu()):
            return False
        if reduction is None:
            return False
    return True


def find_unmergeable(metric: "Metric", *, before: Mapping[str, str]) -> str:
    """Return what of a user's metric workers would not merge; empty if there is nothing.

    ``before`` is what `attributes_outside_states` returned before the metric's first batch.
    """
    from torchmetrics import Metric

    for key, value in vars(metric).items():  # metrics in a list aren't found, and would wait for other ranks
        inner: Iterable[Any] = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
        if key != "_modules" and any(Metric in type(one).__mro__ for one in inner):
            return f"has metrics in the list or dict {key}. Put them into torch.nn.ModuleList or ModuleDict."
    if changed := [key for key, value in attributes_outside_states(metric).items() if before.get(key) != value]:
        remedy = "Declare it with add_state(..., dist_reduce_fx=...)."
        return f"updates {', '.join(changed)}, which is not merged over workers. {remedy}"
    return ""


def attributes_outside_states(metric: "Metric") -> dict[str, str]:
    """Return fingerprints of the public attributes of a user's metric besides its states; none of torchmetrics' own."""
    if type(metric).__module__.partition(".")[0] == "torchmetrics":
        return {}
    public = ((key, value) for key, value in vars(metric).items() if not key.startswith("_"))
    return {key: fingerprint(value) for key, value in public if key not in {*metric._defaults, *_OF_METRICS}}


# What they compute


class Curve(NamedTuple):
    """Points of a curve, such as ROC: one line, or one line for each class."""

    columns: tuple[str, str, str]
    """Names of x, y and the threshold."""
    lines: tuple[tuple[list[float], list[float], list[float]], ...]
    """x, y and thresholds of each line; there may be one threshold fewer."""

    def write(self, path: Path) -> None:
        """Write the points as CSV, a row for each; ``class`` is empty for a single line."""
        rows: list[tuple[Any, ...]] = []
        for number, line in enumerate(self.lines):
            of_class = number if len(self.lines) > 1 else ""
            rows += [(of_class, *point) for point in zip_longest(*line, fillvalue="")]
        _write(path, ("class", *self.columns), rows)

    def draw(self, path: Path, *, title: str) -> None:
        """Draw the lines as a PNG."""
        across, up, _ = (name.replace("_", " ") for name in self.columns)
        figure, axes = _figure(xlabel=across, ylabel=up, title=title)
        for number, (x, y, _) in enumerate(self.lines):
            axes.plot(x, y, label=f"class {number}")
        axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
        axes.grid(alpha=0.3)
        if 1 < len(self.lines) <= _MOST_LABELLED:
            axes.legend()
        figure.savefig(path)


class Array(NamedTuple):
    """A result with many values, such as the confusion matrix of 300 classes."""

    axes: tuple[str, ...]
    """Names of the dimensions."""
    values: Tensor

    def write(self, path: Path) -> None:
        """Write the values as CSV, a row for each with its index in each dimension."""
        indices = product(*map(range, self.values.shape))
        values = zip(indices, self.values.flatten().tolist(), strict=True)
        _write(path, (*self.axes, "value"), ((*index, value) for index, value in values))

    def draw(self, path: Path, *, title: str) -> None:
        """Draw the values as colors in a PNG: the first dimension downwards, all others to the right."""
        figure, axes = _figure(ylabel=self.axes[0], xlabel=", ".join(self.axes[1:]), title=title)
        image = axes.imshow(self.values.reshape(len(self.values), -1).double().numpy(), aspect="auto")
        figure.colorbar(image)
        figure.savefig(path)


Drawable = Curve | Array
"""A result that becomes a table and a picture."""


def _write(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def _figure(**labels: str) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # takes half a second, needed for curves only
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 5), layout="constrained")
    FigureCanvasAgg(figure)  # pyplot might choose a backend with a window
    return figure, figure.add_subplot(**labels)


class Readings(NamedTuple):
    """Computed results of metrics."""

    values: dict[str, float]
    """Numbers by reported name, without "validation/"."""
    curves: dict[str, Drawable]
    """Curves and large results by name of the metric."""


def read(results: Mapping[str, Any], metrics: "Mapping[str, Metric]") -> Readings:
    """Sort results into numbers (one, one for each class, or one with its threshold) and curves.

    Raises:
        ExperimentError: some results are neither.
    """
    readings = Readings({}, {})
    problems: list[Problem] = []
    for name, result in results.items():
        metric = metrics.get(name)
        axes = _axes(metric, result)
        if metric is not None and isinstance(result, tuple) and _is_of_curves(metric) and len(result) == 3:
            readings.curves[name] = _curve(metric, result)
        elif metric is not None and isinstance(result, tuple) and _is_of_curves(metric) and len(result) == 2:
            readings.values.update(_number_values(name, result[0]) | _number_values(f"{name}_threshold", result[1]))
        elif isinstance(result, Tensor) and result.numel() > _MOST_VALUES:
            named = [axis.strip("_") or f"index_{n}" for n, axis in enumerate(axes or ("",) * result.ndim)]
            readings.curves[name] = Array(tuple(named), result.detach().cpu())
        elif isinstance(result, Tensor | float | int):
            readings.values.update(_number_values(name, result, axes=axes))
        else:
            who, key = (name, "metrics") if metric is None else (type(metric).__name__, f"metrics.{name}")
            message = f"{who} returned a {type(result).__name__}. Use a metric that returns a number, a number for "
            problems.append(Problem(key, f"{message}each class, or a ROC or precision-recall curve."))
    if problems:
        raise ExperimentError(problems)
    return readings


def _number_values(name: str, result: Tensor | float, *, axes: tuple[str, ...] = ()) -> dict[str, float]:
    """Return the numbers of a result: one, or one for each class or entry, with its index in each dimension."""
    if not isinstance(result, Tensor) or result.numel() == 1:
        return {name: float(result)}
    axes = axes or ("_",) * result.ndim
    names = ("".join(map(str, chain(*zip(axes, index, strict=True)))) for index in product(*map(range, result.shape)))
    return {f"{name}{index}": float(value) for index, value in zip(names, result.flatten().tolist(), strict=True)}


def _axes(metric: "Metric | None", result: object) -> tuple[str, ...]:
    """Return the parts of names before the indices of a confusion matrix, or of one for each label; else ()."""
    if not isinstance(result, Tensor) or result.ndim < 2:
        return ()
    from torchmetrics.classification import BinaryConfusionMatrix, MulticlassConfusionMatrix, MultilabelConfusionMatrix

    if not isinstance(metric, BinaryConfusionMatrix | MulticlassConfusionMatrix | MultilabelConfusionMatrix):
        return ()
    return ("_",) * (result.ndim - 2) + ("_true_", "_predicted_")


def _is_of_curves(metric: "Metric") -> bool:
    """Return True for torchmetrics' curves (a tuple of three), whose subclasses also compute points (of two)."""
    from torchmetrics import classification as of

    curves = (of.BinaryPrecisionRecallCurve, of.MulticlassPrecisionRecallCurve, of.MultilabelPrecisionRecallCurve)
    return isinstance(metric, curves)


def _curve(metric: "Metric", result: tuple[Any, ...]) -> Curve:
    """Return the curve that a metric has computed, with a line for each class."""
    from torchmetrics.classification import BinaryROC, MulticlassROC, MultilabelROC

    def by_class(part: Any) -> list[list[float]]:  # shape (points,) or (classes, points), or a list of tensors
        if isinstance(part, Tensor):
            part = part if part.ndim == 2 else [part]
        return [values.tolist() for values in part]

    first, second, thresholds = map(by_class, result)
    thresholds = thresholds * len(first) if len(thresholds) == 1 else thresholds
    if isinstance(metric, BinaryROC | MulticlassROC | MultilabelROC):
        columns = ("false_positive_rate", "true_positive_rate", "threshold")
        return Curve(columns, tuple(zip(first, second, thresholds, strict=True)))
    return Curve(("recall", "precision", "threshold"), tuple(zip(second, first, thresholds, strict=True)))

"""Metrics: building them, the direction that is better, merging their states over ranks, and what they compute."""

import csv
from collections.abc import Mapping
from functools import partial
from itertools import chain, groupby, product, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from pipeline.errors import ExperimentError, Problem
from pipeline.experiment.reported import source_of
from pipeline.experiment.values import Component, Create, Direction, Mode
from pipeline.protocol.trial import Rank
from pipeline.train.ranks import gather
from pipeline.train.same import fingerprint

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection

_MOST_LABELLED = 20
_MOST_VALUES = 1000
"""Values of a metric that are numbers of each evaluation; results with more are files of the last one."""
_OF_METRICS = frozenset(("training", "update", "compute", "sync_on_compute"))
"""Public attributes that torchmetrics sets."""


# Building


def build(create: Create, components: Mapping[str, Component]) -> "dict[str, Metric]":
    """Build metrics by name. Without metrics, torchmetrics is not imported."""
    built: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, component in components.items():
        key = f"metrics.{name}"
        try:
            metric = create(component, key=key)
            from torchmetrics import Metric, MetricCollection  # slow to import, and not needed by measurements

            if not isinstance(metric, Metric):
                message = f"is a {type(metric).__name__}; use a torchmetrics metric, which is correct across ranks"
                raise ExperimentError.of(key, message)
            MetricCollection({name: metric})
            built[name] = metric
        except ExperimentError as error:
            problems += error.problems
        except KeyError as error:  # a name that its class uses itself, such as "train", or one with a dot
            problems.append(Problem(key, f"torchmetrics refuses this name: {error.args[0]}; use another"))
    if problems:
        raise ExperimentError(problems)
    return built


def build_collection(
    create: Create, components: Mapping[str, Component], *, device: torch.device
) -> "MetricCollection":
    """Build metrics by name as a collection on the device; see `build` for errors."""
    from torchmetrics import MetricCollection

    # Groups would merge metrics of one class for ever if their states are equal after the first batch.
    return MetricCollection(dict(build(create, components)), compute_groups=False).to(device)


def direction(metric: str, mode: Mode, *, key: str, judges: Mapping[str, Any]) -> Direction:
    """Resolve ``mode: auto`` of a section by torchmetrics' ``higher_is_better``; a smaller loss is better.

    ``key`` names the metric, e.g. "checkpoint.best"; ``judges`` are metrics or their classes, by name.
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
    """Metrics of this rank's samples, and of all samples once they are merged."""

    def __init__(self, metrics: "MetricCollection", *, rank: Rank, copies: bool = False) -> None:
        """Start with the states that the metrics have; ``copies`` if the next batch overwrites what they get."""
        self._metrics, self._rank, self._copies = metrics, rank, copies
        self._named: dict[str, Metric] = dict(metrics.items(copy_state=False))

    def update(self, outputs: Any, targets: Any) -> None:
        """Update all metrics with a batch, 16-bit floats converted to fp32."""
        self._metrics.update(*convert_to_full_precision((outputs, targets), copies=self._copies))

    def merge(self) -> None:
        """Give the metrics of every rank the states of all ranks. Collective."""
        merge(self._metrics, rank=self._rank)

    def read(self) -> "Readings":
        """Return what the metrics compute, of all samples once they are merged; see `read`."""
        return read(self._metrics.compute(), self._named)


def convert_to_full_precision(values: tuple[Any, Any], *, copies: bool = False) -> tuple[Any, Any]:
    """Convert 16-bit floats among a batch's outputs and targets to fp32; with ``copies`` share no memory with them."""

    def converted(tensor: Tensor) -> Tensor:
        is_short = tensor.is_floating_point() and tensor.dtype.itemsize < 4
        return tensor.to(torch.float32 if is_short else tensor.dtype, copy=copies)

    outputs, targets = tree_map_only(Tensor, converted, values)
    return outputs, targets


def merge(metrics: nn.Module, *, rank: Rank) -> None:
    """Give the metrics in a module the states of all ranks: lists rank by rank, tensors as declared. Collective.

    torchmetrics gathers tensor by tensor: ranks with other numbers of batches would abort or hang, and so would a rank
    without samples, whose states still have their first type. Such a rank contributes nothing.
    """
    from torchmetrics.utilities import dim_zero_cat

    def copied(tensor: Tensor) -> Tensor:  # with a view, all that it is a view of would be sent
        return tensor.detach().clone(memory_format=torch.contiguous_format).cpu()

    each = _each(metrics)
    if rank.world_size == 1 or not each:
        return
    own = [(one.update_count, dict(one.metric_state)) for one in each]
    for one, *ranks in zip(each, *gather(tree_map_only(Tensor, copied, own), rank=rank), strict=True):
        given = [state for count, state in ranks if count] or [ranks[0][1]]
        merged: Any
        for name, reduction in one._reductions.items():
            parts = [state[name] for state in given]
            if isinstance(parts[0], list):
                merged = list(chain.from_iterable(parts))
            elif len(parts) == 1:
                merged = parts[0]
            elif reduction is None:  # the metric expects them so
                merged = torch.stack(parts)
            else:
                merged = reduction(parts if reduction is dim_zero_cat else torch.stack(parts))
            setattr(one, name, tree_map_only(Tensor, partial(Tensor.to, device=one.device), merged))
        one._update_count = sum(count for count, _ in ranks)
    compute_alone(metrics)


def compute_alone(metrics: nn.Module) -> None:
    """Keep all metrics in a module from gathering states of other ranks when they compute."""
    for one in _each(metrics):
        one.distributed_available_fn = _is_not_distributed


def _is_not_distributed() -> bool:
    return False


def _each(metrics: nn.Module) -> "list[Metric]":
    """List all metrics in a module, also those inside wrappers, in the same order on all ranks."""
    from torchmetrics import Metric

    # isinstance would take 0.3 s once: for another class Python's ABC asks each subclass of Metric.
    return [cast("Metric", module) for module in metrics.modules() if Metric in type(module).__mro__]


def find_unmergeable(metric: "Metric", *, before: Mapping[str, str]) -> list[str]:
    """Return the attributes of a user's metric that workers would not merge exactly, after its first batch.

    ``before`` is what `attributes_outside_states` returned before that batch.
    """
    from torchmetrics import Metric
    from torchmetrics.utilities import dim_zero_mean

    found = [key for key, value in attributes_outside_states(metric).items() if before.get(key) != value]
    for key, value in vars(metric).items():  # metrics in a list aren't found, and would wait for other ranks
        inner = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
        if key != "_modules" and any(Metric in type(one).__mro__ for one in inner):
            found.append(key)
    if not _is_torchmetrics(metric):  # whose own metrics compute with tensors that are stacked
        tensors = [name for name, default in metric._defaults.items() if isinstance(default, Tensor)]
        found += [name for name in tensors if metric._reductions[name] in (None, dim_zero_mean)]
    return found


def attributes_outside_states(metric: "Metric") -> dict[str, str]:
    """Return fingerprints of the public attributes of a user's metric besides its states; none of torchmetrics' own."""
    if _is_torchmetrics(metric):
        return {}
    public = ((key, value) for key, value in vars(metric).items() if not key.startswith("_"))
    return {key: fingerprint(value) for key, value in public if key not in {*metric._defaults, *_OF_METRICS}}


def _is_torchmetrics(metric: nn.Module) -> bool:
    return type(metric).__module__.partition(".")[0] == "torchmetrics"


# What they compute


class Drawable(NamedTuple):
    """A result that becomes a table and a picture: a curve, such as ROC, or an array of many values."""

    columns: tuple[str, ...]
    """Of a curve: class (empty if there is one line), x, y and threshold. Of an array: its dimensions, and the value.
    """
    rows: list[tuple[Any, ...]]
    values: Tensor | None = None  # The array; None for a curve

    def write(self, path: Path) -> None:
        """Write the rows as CSV."""
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([self.columns, *self.rows])

    def draw(self, path: Path, *, title: str) -> None:
        """Draw a curve's lines, or an array's values as colors, the first dimension downwards, as a PNG."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # takes half a second, needed for curves only
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 5), layout="constrained")
        FigureCanvasAgg(figure)  # pyplot might choose a backend with a window
        axes = figure.add_subplot(title=title)
        if self.values is not None:
            axes.set(ylabel=self.columns[0], xlabel=", ".join(self.columns[1:-1]))
            image = axes.imshow(self.values.reshape(len(self.values), -1).double().numpy(), aspect="auto")
            figure.colorbar(image)
        else:
            lines = [list(points) for _, points in groupby(self.rows, key=lambda row: row[0])]
            for points in lines:
                axes.plot([row[1] for row in points], [row[2] for row in points], label=f"class {points[0][0]}")
            across, up = (name.replace("_", " ") for name in self.columns[1:3])
            axes.set(xlabel=across, ylabel=up, xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
            axes.grid(alpha=0.3)
            if 1 < len(lines) <= _MOST_LABELLED:
                axes.legend()
        figure.savefig(path)


class Readings(NamedTuple):
    """Computed results of metrics."""

    values: dict[str, float]  # Numbers by reported name, without "validation/"
    curves: dict[str, Drawable]  # Curves and large results by name of the metric


def read(results: Mapping[str, Any], metrics: "Mapping[str, Metric]") -> Readings:
    """Sort results into numbers (one, one for each class, or one with its threshold) and curves."""
    readings = Readings({}, {})
    problems: list[Problem] = []
    for name, result in results.items():
        metric = metrics.get(name)
        axes = _axes(metric, result)
        # A curve is a tuple of three; subclasses of torchmetrics' curves compute a point of one, a tuple of two.
        parts = result if isinstance(result, tuple) and metric is not None and _is_of_curves(metric) else ()
        if metric is not None and len(parts) == 3:
            readings.curves[name] = _curve(metric, parts)
        elif len(parts) == 2:
            readings.values.update(_number_values(name, parts[0]) | _number_values(f"{name}_threshold", parts[1]))
        elif isinstance(result, Tensor) and result.numel() > _MOST_VALUES:
            named = (axis.strip("_") or f"index_{n}" for n, axis in enumerate(axes or ("",) * result.ndim))
            indices, values = product(*map(range, result.shape)), result.detach().cpu()
            rows = [(*index, value) for index, value in zip(indices, values.flatten().tolist(), strict=True)]
            readings.curves[name] = Drawable((*named, "value"), rows, values)
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
    from torchmetrics import classification as of

    curves = (of.BinaryPrecisionRecallCurve, of.MulticlassPrecisionRecallCurve, of.MultilabelPrecisionRecallCurve)
    return isinstance(metric, curves)


def _curve(metric: "Metric", result: tuple[Any, ...]) -> Drawable:
    """Return the curve that a metric has computed, with a line for each class."""
    from torchmetrics.classification import BinaryROC, MulticlassROC, MultilabelROC

    def by_class(part: Any) -> list[list[float]]:  # shape (points,) or (classes, points), or a list of tensors
        if isinstance(part, Tensor):
            part = part if part.ndim == 2 else [part]
        return [values.tolist() for values in part]

    first, second, thresholds = map(by_class, result)
    thresholds = thresholds * len(first) if len(thresholds) == 1 else thresholds
    names = ("false_positive_rate", "true_positive_rate")
    if not isinstance(metric, BinaryROC | MulticlassROC | MultilabelROC):
        names, first, second = ("recall", "precision"), second, first
    rows: list[tuple[Any, ...]] = []
    for number, line in enumerate(zip(first, second, thresholds, strict=True)):
        of_class = number if len(first) > 1 else ""
        rows += [(of_class, *point) for point in zip_longest(*line, fillvalue="")]  # there may be a threshold fewer
    return Drawable(("class", *names, "threshold"), rows)

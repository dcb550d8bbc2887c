"""Metrics of the validation set: building them, the direction that is better, and the numbers and curves they give."""

import csv
from collections.abc import Iterator, Mapping
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from pipeline.config.reported import source_of
from pipeline.config.values import Component, Create, Direction, Mode
from pipeline.errors import ExperimentError, Problem

if TYPE_CHECKING:
    from torchmetrics import Metric


_MOST_LABELLED = 20
_MOST_VALUES = 1000
"""Values of a metric that are numbers of each evaluation; results with more are files of the last one."""


def build(create: Create, components: Mapping[str, Component]) -> "dict[str, Metric]":
    """Build metrics by name. Without metrics, torchmetrics is not imported.

    Raises:
        ExperimentError: some can't be built or are not of torchmetrics; lists all of these.
    """
    built: dict[str, Metric] = {}
    problems: list[Problem] = []
    for name, component in components.items():
        try:
            built[name] = _checked(create(component, key=f"metrics.{name}"), name=name)
        except ExperimentError as error:
            problems += error.problems
    if problems:
        raise ExperimentError(problems)
    return built


def direction(metric: str, mode: Mode, *, key: str, judges: Mapping[str, Any]) -> Direction:
    """Resolve ``mode: auto`` by torchmetrics' ``higher_is_better``; a smaller loss is better.

    Args:
        metric: reported name, e.g. "validation/accuracy", or "validation/accuracy_0" for the first class.
        mode: the section's ``mode``.
        key: key that names the metric, e.g. "checkpoint.best".
        judges: metrics or their classes, by name.

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


def _checked(metric: Any, *, name: str) -> "Metric":
    from torchmetrics import Metric, MetricCollection  # takes as long as torch; a measurement does without

    if not isinstance(metric, Metric):
        raise ExperimentError.of(
            f"metrics.{name}",
            f"is a {type(metric).__name__}; use a torchmetrics metric, which is correct across ranks",
        )
    try:
        MetricCollection({name: metric})
    except KeyError as error:  # a name that its class uses itself, such as "train", or one with a dot
        raise ExperimentError.of(
            f"metrics.{name}", f"torchmetrics refuses this name: {error.args[0]}; use another"
        ) from error
    return metric


class Curve(NamedTuple):
    """Points of a curve, such as ROC: one line, or one line for each class."""

    columns: tuple[str, str, str]
    """Names of x, y and the threshold."""
    lines: tuple[tuple[list[float], list[float], list[float]], ...]
    """x, y and thresholds of each line; there may be one threshold fewer."""

    def write(self, path: Path) -> None:
        """Write the points as CSV, a row for each; ``class`` is empty for a single line."""
        with path.open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(("class", *self.columns))
            rows.writerows(self._rows())

    def draw(self, path: Path, *, title: str) -> None:
        """Draw the lines as a PNG."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # takes half a second, needed for curves only
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 5), layout="constrained")
        axes = figure.add_subplot(
            xlabel=self.columns[0].replace("_", " "), ylabel=self.columns[1].replace("_", " "), title=title
        )
        for number, (across, up, _) in enumerate(self.lines):
            axes.plot(across, up, label=f"class {number}")
        axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
        axes.grid(alpha=0.3)
        if 1 < len(self.lines) <= _MOST_LABELLED:
            axes.legend()
        FigureCanvasAgg(figure)  # pyplot might choose a backend with a window
        figure.savefig(path)

    def _rows(self) -> Iterator[tuple[Any, ...]]:
        for number, (across, up, thresholds) in enumerate(self.lines):
            short = len(across) - len(thresholds)
            for point in zip(across, up, [*thresholds, *[""] * short], strict=True):
                yield (number if len(self.lines) > 1 else "", *point)


class Array(NamedTuple):
    """A result with many values, such as the confusion matrix of 300 classes."""

    axes: tuple[str, ...]
    """Names of the dimensions."""
    values: Tensor

    def write(self, path: Path) -> None:
        """Write the values as CSV, a row for each with its index in each dimension."""
        with path.open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow((*self.axes, "value"))
            indices = product(*map(range, self.values.shape))
            rows.writerows(
                (*index, value) for index, value in zip(indices, self.values.flatten().tolist(), strict=True)
            )

    def draw(self, path: Path, *, title: str) -> None:
        """Draw the values as colors in a PNG: the first dimension downwards, all others to the right."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 5), layout="constrained")
        axes = figure.add_subplot(ylabel=self.axes[0], xlabel=", ".join(self.axes[1:]), title=title)
        image = axes.imshow(self.values.reshape(len(self.values), -1).double().numpy(), aspect="auto")
        figure.colorbar(image)
        FigureCanvasAgg(figure)  # pyplot might choose a backend with a window
        figure.savefig(path)


Drawable = Curve | Array
"""A result that becomes a table and a picture."""


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
        if metric is not None and (curve := curve_of(metric, result)) is not None:
            readings.curves[name] = curve
        elif metric is not None and has_threshold(metric, result):
            readings.values.update(_numbered(name, result[0]) | _numbered(f"{name}_threshold", result[1]))
        elif isinstance(result, Tensor) and result.numel() > _MOST_VALUES:
            axes = [
                axis.strip("_") or f"index_{n}" for n, axis in enumerate(_axes(metric, result) or ("",) * result.ndim)
            ]
            readings.curves[name] = Array(tuple(axes), result.detach().cpu())
        elif isinstance(result, Tensor | float | int):
            readings.values.update(_numbered(name, result, axes=_axes(metric, result)))
        else:
            problems.append(_without_number(name, result, metric))
    if problems:
        raise ExperimentError(problems)
    return readings


def _numbered(name: str, result: Tensor | float, *, axes: tuple[str, ...] = ()) -> dict[str, float]:
    """Return the numbers of a result: one, or one for each class or entry, with its index in each dimension."""
    if not isinstance(result, Tensor) or result.numel() == 1:
        return {name: float(result)}
    axes = axes or ("_",) * result.ndim
    names = ("".join(map(str, chain(*zip(axes, index, strict=True)))) for index in product(*map(range, result.shape)))
    return {f"{name}{index}": float(value) for index, value in zip(names, result.flatten().tolist(), strict=True)}


def _axes(metric: "Metric | None", result: Tensor | float) -> tuple[str, ...]:
    """Return the parts of names before the indices of a confusion matrix, or of one for each label; else ()."""
    if not isinstance(result, Tensor) or result.ndim < 2:
        return ()
    from torchmetrics.classification import BinaryConfusionMatrix, MulticlassConfusionMatrix, MultilabelConfusionMatrix

    if not isinstance(metric, BinaryConfusionMatrix | MulticlassConfusionMatrix | MultilabelConfusionMatrix):
        return ()
    return ("_",) * (result.ndim - 2) + ("_true_", "_predicted_")


def _without_number(name: str, result: object, metric: "Metric | None") -> Problem:
    who = type(metric).__name__ if metric is not None else name
    message = f"{who} returned a {type(result).__name__}. Use a metric that returns a number, a number for each class, "
    return Problem(
        f"metrics.{name}" if metric is not None else "metrics", f"{message}or a ROC or precision-recall curve."
    )


def curve_of(metric: "Metric", result: Any) -> Curve | None:
    """Return the curve that a metric has computed; None if the result is no curve of a known kind."""
    from torchmetrics.classification import BinaryROC, MulticlassROC, MultilabelROC

    if not (_is_tuple(metric, result) and len(result) == 3):
        return None
    first, second, thresholds = (_by_class(part) for part in result)
    thresholds = thresholds * len(first) if len(thresholds) == 1 else thresholds
    if isinstance(metric, BinaryROC | MulticlassROC | MultilabelROC):
        columns = ("false_positive_rate", "true_positive_rate", "threshold")
        return Curve(columns, tuple(zip(first, second, thresholds, strict=True)))
    return Curve(("recall", "precision", "threshold"), tuple(zip(second, first, thresholds, strict=True)))


def has_threshold(metric: "Metric", result: Any) -> bool:
    """Return True if a metric has computed a value and its threshold, as RecallAtFixedPrecision does."""
    return _is_tuple(metric, result) and len(result) == 2


def _is_tuple(metric: "Metric", result: Any) -> bool:
    """Return True for a tuple from one of torchmetrics' curves, whose subclasses also compute other results."""
    from torchmetrics.classification import (
        BinaryPrecisionRecallCurve,
        MulticlassPrecisionRecallCurve,
        MultilabelPrecisionRecallCurve,
    )

    curves = (BinaryPrecisionRecallCurve, MulticlassPrecisionRecallCurve, MultilabelPrecisionRecallCurve)
    return isinstance(result, tuple) and isinstance(metric, curves)


def _by_class(part: Any) -> list[list[float]]:
    """Convert a tensor of shape (points,) or (classes, points), or a list of tensors, to a list for each class."""
    if isinstance(part, Tensor):
        part = part if part.ndim == 2 else [part]
    return [values.tolist() for values in part]

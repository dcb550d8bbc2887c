"""The metrics of the validation set: built, read, and which of their values are good."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from pipeline.config.reported import source_of
from pipeline.config.values import Component, Direction, Mode
from pipeline.errors import ExperimentError, Problem
from pipeline.training.curves import Curve, curve_of, has_threshold
from pipeline.training.parts import Create

if TYPE_CHECKING:
    from torchmetrics import Metric


def build(create: Create, components: Mapping[str, Component]) -> "dict[str, Metric]":
    """Build metrics, by name; without any, torchmetrics is not imported.

    Raises:
        ExperimentError: some can't be built, or are no torchmetrics metrics; all of them.
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
    """Resolve ``mode: auto``: torchmetrics' ``higher_is_better`` decides; a loss is to be small.

    Args:
        metric: a reported name, e.g. "validation/accuracy", or "validation/accuracy_0" of the first class.
        mode: of the section.
        key: where the metric is named, e.g. "checkpoint.best".
        judges: metrics, or their classes, by name.

    Raises:
        ExperimentError: the metric doesn't say what is good.
    """
    if mode != "auto":
        return mode
    source = source_of(metric, judges)
    if source == "loss":
        return "min"
    judge = judges.get(source or "")
    higher_is_better = getattr(judge, "higher_is_better", None)
    if not isinstance(higher_is_better, bool):
        kind = judge.__name__ if isinstance(judge, type) else type(judge).__name__
        section = key.partition(".")[0]
        message = f"is {metric}, and {kind} doesn't say whether large or small values are good; write {section}.mode: "
        raise ExperimentError.of(key, f"{message}max, or min")
    return "max" if higher_is_better else "min"


def _checked(metric: Any, *, name: str) -> "Metric":
    from torchmetrics import Metric  # takes as long as torch; a measurement does without

    if not isinstance(metric, Metric):
        raise ExperimentError.of(
            f"metrics.{name}",
            f"is a {type(metric).__name__}; metrics come from torchmetrics, whose sums are right across ranks",
        )
    return metric


class Readings(NamedTuple):
    """What metrics have computed."""

    values: dict[str, float]
    """Numbers, by the names that are reported after "validation/"."""
    curves: dict[str, Curve]
    """By the metric's name."""


def read(results: Mapping[str, Any], metrics: "Mapping[str, Metric]") -> Readings:
    """Sort results into numbers and curves: a number, one for each class, or one with its threshold.

    Raises:
        ExperimentError: some are neither.
    """
    readings = Readings({}, {})
    problems: list[Problem] = []
    for name, result in results.items():
        metric = metrics.get(name)
        if metric is not None and (curve := curve_of(metric, result)) is not None:
            readings.curves[name] = curve
        elif metric is not None and has_threshold(metric, result):
            readings.values.update(_numbered(name, result[0]) | _numbered(f"{name}_threshold", result[1]))
        elif isinstance(result, Tensor | float | int):
            readings.values.update(_numbered(name, result))
        else:
            problems.append(_without_number(name, result, metric))
    if problems:
        raise ExperimentError(problems)
    return readings


def _numbered(name: str, result: Tensor | float) -> dict[str, float]:
    if not isinstance(result, Tensor) or result.numel() == 1:
        return {name: float(result)}
    return {f"{name}_{i}": float(value) for i, value in enumerate(result.flatten())}  # one for each class


def _without_number(name: str, result: object, metric: "Metric | None") -> Problem:
    who = type(metric).__name__ if metric is not None else name
    message = (
        f"{who} computes a {type(result).__name__}; use a metric that computes a number, one for each class, or a "
    )
    return Problem(f"metrics.{name}" if metric is not None else "metrics", f"{message}ROC or precision-recall curve")

"""Curves that metrics compute, such as ROC: as a table and as a picture."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from torchmetrics import Metric

_MOST_LABELLED = 20


class Curve(NamedTuple):
    """Points of one line for each class, or of one line alone."""

    columns: tuple[str, str, str]
    """Across, up, and what both depend on."""
    lines: tuple[tuple[list[float], list[float], list[float]], ...]
    """In the order of the columns; the last one may be shorter by one."""

    def write(self, path: Path) -> None:
        """Write the table as CSV, a row for each point; ``class`` is empty where there is one line."""
        with path.open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(("class", *self.columns))
            rows.writerows(self._rows())

    def micro_batch(self, path: Path, *, title: str) -> None:
        """Draw the lines as a PNG."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # takes half a second; only where there is a curve
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
        FigureCanvasAgg(figure)  # not pyplot's choice, which may be a window
        figure.savefig(path)

    def _rows(self) -> Iterator[tuple[Any, ...]]:
        for number, (across, up, thresholds) in enumerate(self.lines):
            short = len(across) - len(thresholds)
            for point in zip(across, up, [*thresholds, *[""] * short], strict=True):
                yield (number if len(self.lines) > 1 else "", *point)


def curve_of(metric: "Metric", result: Any) -> Curve | None:
    """The curve that a metric has computed; None if it is none, or of a kind that isn't known."""
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
    """Whether a metric has computed a point of its curve: a value and its threshold, as RecallAtFixedPrecision does."""
    return _is_tuple(metric, result) and len(result) == 2


def _is_tuple(metric: "Metric", result: Any) -> bool:
    """Whether it is what torchmetrics' curves compute, whose many descendants compute other things, too."""
    from torchmetrics.classification import (
        BinaryPrecisionRecallCurve,
        MulticlassPrecisionRecallCurve,
        MultilabelPrecisionRecallCurve,
    )

    curves = (BinaryPrecisionRecallCurve, MulticlassPrecisionRecallCurve, MultilabelPrecisionRecallCurve)
    return isinstance(result, tuple) and isinstance(metric, curves)


def _by_class(part: Any) -> list[list[float]]:
    """Tensors of (points) or (classes, points), or a list with a tensor for each class."""
    if isinstance(part, Tensor):
        part = part if part.ndim == 2 else [part]
    return [values.tolist() for values in part]

"""Names of reported metrics, such as validation/accuracy, in experiments and in MLflow."""

import re
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping

from pipeline.errors import Problem
from pipeline.wording import figure

PREFIX, TRAIN = "validation/", "train/"
LOSS, GRADIENT_NORM = "loss", "gradient_norm"
LEARNING_RATE, OF_GROUP = "learning_rate", "_group_"
OF_TRAINING = (
    *(f"{name}{end}" for name in (LOSS, GRADIENT_NORM) for end in ("", "_min", "_max")),
    LEARNING_RATE,
    "skipped_steps",
)
"""Metrics of a step that the project reports itself, without "train/"; all others are logs of a task."""
_FORBIDDEN = re.compile(r"[^\w\-./: ]")
_NOT_A_FOLDER = re.compile(r"(?<![^/])(\.{0,2})(?![^/])")
"""Part of a name between slashes that is not the name of a folder: empty, or dots."""
_MLFLOW_LENGTH = 250
_MOST_VALUES = 4
_INDEX = re.compile(r"(_true|_predicted)?_\d+\Z")
_PLACE = re.compile(r"(_true_\d+_predicted)?_\d+\Z")  # Place of a value among those of a class or of a matrix


def source_of(reported: str, metrics: Container[str]) -> str | None:
    """Return the metric, or "loss", behind a reported name, or None; per-class values end in _0, _1, ..."""
    name = reported.removeprefix(PREFIX)
    if name == "loss":
        return name
    while name not in metrics:
        shorter = _INDEX.sub("", name)
        if shorter == name:
            return None
        name = shorter
    return name


def group_by_metric(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of the values of each metric: one, or those of classes or of a matrix."""
    by_metric = defaultdict[str, list[str]](list)
    for name in names:
        by_metric[_PLACE.sub("", name)].append(name)
    return by_metric


def single_names(names: Iterable[str]) -> list[str]:
    """Return the names of metrics that have one value."""
    return [values[0] for values in group_by_metric(names).values() if len(values) == 1]


def iter_shown_names(names: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield each name and 1, or the metric and the number of its values if they are more than four (a matrix)."""
    for metric, own in group_by_metric(names).items():
        yield from [(metric, len(own))] if len(own) > _MOST_VALUES else [(name, 1) for name in own]


def iter_formatted(values: Mapping[str, float]) -> Iterator[str]:
    """Yield values with their names for a line of text, e.g. "validation/loss 0.31" and "test/confusion (9 values)"."""
    for name, count in iter_shown_names(values):
        yield f"{name} {figure(values[name])}" if count == 1 else f"{name} ({count} values)"


def mlflow_name(name: str) -> str:
    """Return a name that MLflow accepts; a name that it rejects makes it reject a whole batch of values."""
    return _NOT_A_FOLDER.sub("_", _FORBIDDEN.sub("_", name)[:_MLFLOW_LENGTH])


def mlflow_names(names: Iterable[str]) -> dict[str, str]:
    """Return a name that MLflow accepts for each name. If two would be equal, the later one gets a number."""
    written = {name: mlflow_name(name) for name in names}
    taken = {name for name, accepted in written.items() if name == accepted}
    numbers = defaultdict[str, int](int)
    for name, accepted in written.items():
        candidate = accepted
        while name != accepted and candidate in taken:
            numbers[accepted] += 1
            candidate = f"{accepted[: _MLFLOW_LENGTH - 9]}_{numbers[accepted] + 1}"
        taken.add(candidate)
        written[name] = candidate
    return written


def name_problems(metrics: Iterable[str]) -> Iterator[Problem]:
    """Find metrics whose values would merge into one series, in the report or in MLflow."""
    known = {mlflow_name(f"{PREFIX}loss"): "loss"}
    for name in metrics:
        written = mlflow_name(f"{PREFIX}{name}")
        if name == "loss":
            yield Problem(
                "metrics.loss",
                "the validation loss already has this name. Choose another name for this metric.",
            )
        elif written in known:
            message = f"has the same name in MLflow as metrics.{known[written]}: {written}. Rename one of them."
            yield Problem(f"metrics.{name}", message)
        known[written] = name

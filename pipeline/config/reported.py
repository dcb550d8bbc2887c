"""Names that evaluation reports metrics by, as experiments and MLflow write them."""

import re
from collections.abc import Container, Iterable, Iterator

from pipeline.errors import Problem

PREFIX = "validation/"
_FORBIDDEN = re.compile(r"[^\w\-./: ]")
_MLFLOW_LENGTH = 250


def source_of(reported: str, metrics: Container[str]) -> str | None:
    """The metric, or "loss", that gives a reported value; a value for each class is numbered: validation/accuracy_0."""
    name = reported.removeprefix(PREFIX)
    if name == "loss" or name in metrics:
        return name
    numbered = re.fullmatch(r"(.+)_\d+", name, re.DOTALL)
    return numbered[1] if numbered and numbered[1] in metrics else None


def mlflow_name(name: str) -> str:
    """The name in MLflow, which refuses a whole batch of values for one character that it doesn't take."""
    return _FORBIDDEN.sub("_", name)[:_MLFLOW_LENGTH]


def name_problems(metrics: Iterable[str]) -> Iterator[Problem]:
    """Metrics whose values would become one series, in the report or in MLflow."""
    known = {mlflow_name(f"{PREFIX}loss"): "loss"}
    for name in metrics:
        written = mlflow_name(f"{PREFIX}{name}")
        if name == "loss":
            yield Problem("metrics.loss", "validation/loss is reported anyway; give this metric another name")
        elif written in known:
            message = f"is {written} in MLflow, as metrics.{known[written]} is; give one of them another name"
            yield Problem(f"metrics.{name}", message)
        known[written] = name

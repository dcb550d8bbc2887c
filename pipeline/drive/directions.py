"""Directions in which metrics are better: for ``checkpoint.best``, early stopping, a sweep, and the tables of runs."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from pipeline.experiment import components, references
from pipeline.experiment.reported import PREFIX, source_of
from pipeline.experiment.schema import Experiment
from pipeline.experiment.values import Direction, Mode
from pipeline.system import undisturbed


def judges(experiment: Experiment, *, allowed: tuple[str, ...]) -> dict[str, Any]:
    """Build the metrics, which know which values are good; of those that need run-time values, return the classes."""
    with undisturbed():
        from pipeline.train import metrics

    filled = references.fill_in(experiment).metrics
    late = {name for name, one in filled.items() if "${" in one.model_dump_json()}
    early = {name: one for name, one in filled.items() if name not in late}
    built: dict[str, Any] = dict(metrics.build(partial(components.build, allowed=allowed), early))
    for name in late:
        built[name] = components.resolve(experiment.metrics[name], key=f"metrics.{name}", allowed=allowed)
    return built


def direction_of(metric: str, mode: Mode, *, key: str, judges: Mapping[str, Any]) -> Direction:
    """Return the direction in which a metric is better, which the file names at ``key``."""
    with undisturbed():
        from pipeline.train import metrics

    return metrics.direction(metric, mode, key=key, judges=judges)


def directions(experiment: Experiment, *, allowed: tuple[str, ...]) -> dict[str, Direction]:
    """Return the direction in which each validation metric is better, by reported name: ``checkpoint.best`` first.

    Metrics whose class does not define it are left out. With several optimizers, which may train adversaries, all are
    left out but ``checkpoint.best``: a discriminator's accuracy is good neither if it is high nor if it is low.
    """
    found: dict[str, Direction] = {}
    for name, metric in experiment.metrics.items():
        kind = components.resolve(metric, key=f"metrics.{name}", allowed=allowed)
        if isinstance(is_higher := getattr(kind, "higher_is_better", None), bool):
            found[f"{PREFIX}{name}"] = "max" if is_higher else "min"
    found[f"{PREFIX}loss"] = "min"
    best, mode = experiment.checkpoint.best, experiment.checkpoint.mode
    others = {} if experiment.optimizers else {name: each for name, each in found.items() if name != best}
    if best is None:
        return others
    own = found.get(best, found.get(f"{PREFIX}{source_of(best, experiment.metrics)}"))
    direction = own if mode == "auto" else mode
    return others if direction is None else {best: direction, **others}

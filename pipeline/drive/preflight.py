"""Checks of an experiment before any process is started; all problems are reported together.

Functions that need torch import it themselves: it takes seconds, and most mistakes are found without it.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from multiprocessing.util import get_temp_dir
from typing import Any

from pydantic import ValidationError

from pipeline import registry
from pipeline.drive import parameters
from pipeline.errors import ExperimentError, Problem, refusals
from pipeline.experiment import components, deferred, messages, sweep
from pipeline.experiment.benchmark_section import Configuration
from pipeline.experiment.load import ExperimentFile
from pipeline.experiment.reported import PREFIX, source_of
from pipeline.experiment.schema import Experiment
from pipeline.experiment.sweep import Sweep
from pipeline.experiment.targets import allowed_packages, list_once
from pipeline.experiment.values import Direction, Mode
from pipeline.plan.describe import DataSizes
from pipeline.system.imports import undisturbed
from pipeline.tracking import loggers

_LONGEST_FOLDER = 107 - len("/pymp-12345678/listener-12345678")
"""Characters that `multiprocessing` leaves of the path of a Unix socket, whose limit is 107."""


def check(file: ExperimentFile, *, with_data: bool = False, with_weights: bool = True) -> tuple[str, ...]:
    """Check components and their arguments, strategies and their options, metrics and values of a sweep.

    With ``with_data`` the data is loaded, too; ``with_weights`` looks for those to start from.

    Nothing is built before all names are allowed, also those of a sweep's values.

    Returns the packages that components may come from.

    Raises:
        ExperimentError: all problems, with their places.
        UsageError: the project's pyproject.toml is malformed.
    """
    allowed = allowed_packages()
    problems, rejected = components.check(file.experiment, allowed=allowed)
    problems += _strategy_problems(file.experiment)
    problems += _temporary_folder_problems(file.experiment)
    problems += loggers.problems(file.experiment.tracking.loggers)
    if rejected := rejected or _find_wrong_values(file, allowed=allowed):
        error = file.explain(dict.fromkeys([*problems, *rejected]))
        raise ExperimentError(list_once(error.problems, allowed=allowed))
    if not any(problem.key.partition(".")[0] in ("model", "task") for problem in problems):
        problems += _task_problems(file.experiment, allowed=allowed)
    wrong = {problem.key.partition(".")[0] for problem in problems}
    if "metrics" not in wrong:
        problems += refusals(lambda: _check_metrics(file.experiment, allowed=allowed))
    if with_data and wrong.isdisjoint(("data", "sampler")):
        problems += refusals(lambda: data_sizes(file.experiment, allowed=allowed))
    if wrong.isdisjoint(("model", "optimizer")):
        problems += parameters.problems(file.experiment, allowed=allowed, with_weights=with_weights)
    if not problems:
        problems = sweep.problems(file.experiment.sweep, file.varied, partial(check, with_weights=with_weights))
    if problems:
        raise file.explain(problems)
    return allowed


def judges(experiment: Experiment, *, allowed: tuple[str, ...]) -> dict[str, Any]:
    """Build the metrics, which know whether small or large values are good.

    Metrics that need run-time values can't be built yet; their classes are returned instead.

    Raises:
        ExperimentError: a metric can't be built.
    """
    with undisturbed():
        from pipeline.train import metrics

    late = {name for name, one in experiment.metrics.items() if deferred.runtime_values_in(one.model_dump_json())}
    early = {name: one for name, one in experiment.metrics.items() if name not in late}
    built: dict[str, Any] = dict(metrics.build(partial(components.build, allowed=allowed), early))
    for name in late:
        built[name] = components.resolve(experiment.metrics[name], key=f"metrics.{name}", allowed=allowed)
    return built


def directions(experiment: Experiment, *, allowed: tuple[str, ...]) -> dict[str, Direction]:
    """Return the direction in which each validation metric is better, by reported name: ``checkpoint.best`` first.

    Metrics whose class does not define it are left out. With several optimizers, which may train adversaries, all are
    left out but ``checkpoint.best``: a discriminator's accuracy is good neither if it is high nor if it is low.

    Raises:
        ExperimentError: a metric can't be found.
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


def best_direction(experiment: Experiment, *, allowed: tuple[str, ...]) -> Direction:
    """Resolve ``checkpoint.mode`` of an experiment that has ``checkpoint.best``.

    Raises:
        ExperimentError: it is ``auto``, and the metric doesn't know whether small or large values are good.
    """
    options, key = experiment.checkpoint, "checkpoint.best"
    assert options.best is not None
    return _direction(options.best, options.mode, key=key, judges=judges(experiment, allowed=allowed))


def sweep_direction(sweep: Sweep, judges: Mapping[str, Any]) -> Direction:
    """Resolve ``sweep.mode``.

    Raises:
        ExperimentError: it is ``auto``, and the metric doesn't know whether small or large values are good.
    """
    return _direction(sweep.metric, sweep.mode, key="sweep.metric", judges=judges)


def data_sizes(experiment: Experiment, *, allowed: tuple[str, ...]) -> DataSizes:
    """Load the data and count its samples, and the steps in an epoch of its order.

    Raises:
        ExperimentError: the data can't be loaded, or is empty, or the order doesn't fit it.
        TrainingError: a sample that the order needs can't be read.
    """
    with undisturbed():
        from pipeline.train import batches, iterable

    train, *held_out = batches.build_data(experiment, allowed=allowed)
    order = batches.train_order(experiment, train, allowed=allowed)
    named = zip(("validation", "test"), held_out, strict=True)
    validation, test = (batches.held_out_size(experiment, one, what=name) for name, one in named)
    return DataSizes(
        None if order.is_endless else order.set_size,
        validation,
        order.steps_per_epoch,
        test,
        order.samples,
        iterable.notes(train, experiment),
    )


def _temporary_folder_problems(experiment: Experiment) -> Iterator[Problem]:
    """Find a temporary folder whose path is too long for the sockets of DataLoader workers."""
    workers, folder = experiment.loader.num_workers, tempfile.gettempdir()
    # Python 3.14 makes its folder in /tmp if this one is too long.
    if workers and len(os.fsencode(folder)) > _LONGEST_FOLDER and get_temp_dir().startswith(folder):
        yield Problem(
            "loader.num_workers",
            f"is {workers}, but TMPDIR has {len(folder)} characters. DataLoader workers need sockets there, whose "
            f"paths are limited. Set TMPDIR to a path of at most {_LONGEST_FOLDER} characters.",
        )


def _find_wrong_values(file: ExperimentFile, *, allowed: tuple[str, ...]) -> list[Problem]:
    """Find wrong components in the values of an experiment's sweep."""

    def check_varied(varied: ExperimentFile) -> None:
        if found := components.check(varied.experiment, allowed=allowed).problems:
            raise ExperimentError(found)

    return sweep.problems(file.experiment.sweep, file.varied, check_varied)


def _task_problems(experiment: Experiment, *, allowed: tuple[str, ...]) -> Iterator[Problem]:
    """Find what the task's class finds in an experiment, if it has a method ``experiment_problems``."""
    task = components.resolve(experiment.task, key="task", allowed=allowed) if experiment.task is not None else None
    if (find := getattr(task, "experiment_problems", None)) is not None:
        yield from find(experiment, components.resolve(experiment.model, key="model", allowed=allowed))


def _check_metrics(experiment: Experiment, *, allowed: tuple[str, ...]) -> None:
    built, checkpoint, sweep = judges(experiment, allowed=allowed), experiment.checkpoint, experiment.sweep
    problems: list[Problem] = []
    if (best := checkpoint.best) is not None:
        problems += refusals(lambda: _direction(best, checkpoint.mode, key="checkpoint.best", judges=built))
    if (stopping := experiment.train.early_stopping) is not None:
        key = "train.early_stopping.metric"
        problems += refusals(lambda: _direction(stopping.metric, stopping.mode, key=key, judges=built))
    if experiment.scheduler is not None and experiment.scheduler.target.endswith(".ReduceLROnPlateau"):
        mode = str(experiment.scheduler.arguments.get("mode", "min"))
        problems += refusals(lambda: _check_plateau(mode, experiment, judges=built))
    if sweep is not None:
        problems += refusals(lambda: sweep_direction(sweep, built))
    if problems:
        raise ExperimentError(problems)


def _direction(metric: str, mode: Mode, *, key: str, judges: Mapping[str, Any]) -> Direction:
    with undisturbed():
        from pipeline.train import metrics

    return metrics.direction(metric, mode, key=key, judges=judges)


def _check_plateau(mode: str, experiment: Experiment, *, judges: Mapping[str, Any]) -> None:
    with undisturbed():
        from pipeline.train import schedules

    schedules.check_plateau(mode, experiment.train, judges=judges)


def _strategy_problems(experiment: Experiment) -> Iterator[Problem]:
    parallel = experiment.parallel
    main = Configuration(strategy=parallel.strategy, workers=parallel.workers, options=parallel.options)
    for key, entry in (("parallel", main), ("benchmark.baseline", experiment.benchmark.baseline)):
        strategy: Any = registry.load("strategies", entry.strategy).Strategy
        if strategy.processes == "one" and (entry.workers or 1) > 1:
            yield Problem(
                f"{key}.workers",
                f"is {entry.workers}, but strategy {entry.strategy} runs one process. Set 1, or strategy: ddp.",
            )
        try:
            options = strategy.Options.model_validate(entry.options)
            if experiment.optimizers and (reason := strategy.refuse_several(options)):
                yield Problem(f"{key}.options" if entry.options else f"{key}.strategy", reason)
        except ValidationError as error:
            for problem in messages.problems(error, strategy.Options, entry.options):
                yield problem._replace(key=f"{key}.options.{problem.key}")

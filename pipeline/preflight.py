"""Everything that can be wrong with an experiment before a process is started, all at once."""

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from pipeline import registry
from pipeline.config import components, messages, variation
from pipeline.config.load import ExperimentFile
from pipeline.config.schema import Comparison, Experiment
from pipeline.errors import Problem
from pipeline.training import parts
from pipeline.training.loader import length
from pipeline.training.order import Order


def check(file: ExperimentFile) -> tuple[str, ...]:
    """Check what the file names: components with their arguments, strategies with their options, values of a sweep.

    Returns the packages that components may come from.

    Raises:
        ExperimentError: all problems, with their places.
        UsageError: the project's pyproject.toml is malformed.
    """
    allowed = components.allowed_packages()
    problems = components.check(file.experiment, allowed=allowed)
    problems += _strategy_problems(file.experiment)
    if not problems:
        problems = variation.check_each(file.experiment, file.varied, check)
    if problems:
        raise file.explain(problems)
    return allowed


def dataset_sizes(experiment: Experiment, *, allowed: tuple[str, ...]) -> tuple[int, int]:
    """Training and validation samples, by really loading the data.

    Raises:
        ExperimentError: the data can't be loaded, or is empty.
    """
    train, validation = parts.data(experiment, allowed=allowed)
    return length(train, what="training"), 0 if validation is None else length(validation, what="validation")


def steps_per_epoch(experiment: Experiment, *, train_samples: int) -> int:
    """Optimizer steps in an epoch over that many samples."""
    order = Order(samples=train_samples, global_batch_size=experiment.train.global_batch_size, seed=experiment.seed)
    return order.steps_per_epoch


def _strategy_problems(experiment: Experiment) -> Iterator[Problem]:
    parallel = experiment.parallel
    main = Comparison(strategy=parallel.strategy, workers=parallel.workers, options=parallel.options)
    for key, entry in (("parallel", main), *((f"compare[{i}]", entry) for i, entry in enumerate(experiment.compare))):
        strategy: Any = registry.load("strategies", entry.strategy).Strategy
        if strategy.processes == "one" and (entry.workers or 1) > 1:
            yield Problem(
                f"{key}.workers", f"is {entry.workers}, but {entry.strategy} is one process; write 1, or strategy: ddp"
            )
        try:
            strategy.Options.model_validate(entry.options)
        except ValidationError as error:
            for problem in messages.problems(error, strategy.Options, entry.options):
                yield problem._replace(key=f"{key}.options.{problem.key}")

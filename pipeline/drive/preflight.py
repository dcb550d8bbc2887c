"""Checks of an experiment before any process is started; all problems are reported together.

Functions that need torch import it themselves: it takes seconds, and most mistakes are found without it.
"""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from pydantic import ValidationError

from pipeline import registry
from pipeline.drive.checkpoints import direction_of, find_initial, judges
from pipeline.drive.execute import explain_problems
from pipeline.errors import ExperimentError, Problem, ResourceError, refusals
from pipeline.experiment import components, references, sweep
from pipeline.experiment.load import ExperimentFile
from pipeline.experiment.problems import find_problems
from pipeline.experiment.schema import Experiment
from pipeline.experiment.targets import allowed_packages
from pipeline.launch.base import Session
from pipeline.plan import resources
from pipeline.plan.plan import DataSizes, make_plan
from pipeline.plan.resources import Resources
from pipeline.protocol.events import AnyEvent
from pipeline.protocol.trial import BatchCheck, Trial
from pipeline.system import find_memory_limits, undisturbed
from pipeline.tracking import loggers

if TYPE_CHECKING:
    from torch import nn

_log = logging.getLogger(__name__)
_MANY = 2**16


def check(file: ExperimentFile, *, with_data: bool = False, with_weights: bool = True) -> tuple[str, ...]:
    """Check all of the file that needs no workers, names first; return the packages that components may come from."""
    allowed, experiment = allowed_packages(), file.experiment

    def check_varied(varied: ExperimentFile) -> None:
        if found := components.check(varied.experiment, allowed=allowed).problems:
            raise ExperimentError(found)

    problems, rejected = components.check(experiment, allowed=allowed)
    problems += _find_strategy_problems(experiment)
    problems += loggers.problems(experiment.tracking.loggers)
    if rejected := rejected or sweep.find_problems(experiment.sweep, file.vary, check_varied):
        raise file.explain(dict.fromkeys([*problems, *rejected]))

    def are_right(*sections: str) -> bool:
        return not any(problem.key.partition(".")[0] in sections for problem in problems)

    if are_right("model", "task") and experiment.task is not None:
        task = components.resolve(experiment.task, key="task", allowed=allowed)
        if (find := getattr(task, "experiment_problems", None)) is not None:
            problems += find(experiment, components.resolve(experiment.model, key="model", allowed=allowed))
    if are_right("metrics"):
        problems += _find_metric_problems(experiment, allowed=allowed)
    if with_data and are_right("data", "sampler"):
        problems += refusals(lambda: data_sizes(experiment, allowed=allowed))
    if are_right("model", "optimizer"):
        problems += find_parameter_problems(experiment, allowed=allowed, with_weights=with_weights)
    if not problems:
        problems = sweep.find_problems(experiment.sweep, file.vary, partial(check, with_weights=with_weights))
    if problems:
        raise file.explain(problems)
    return allowed


def data_sizes(experiment: Experiment, *, allowed: tuple[str, ...]) -> DataSizes:
    """Load the data and count its samples, and the steps in an epoch of its order."""
    with undisturbed():
        from pipeline.train import batches, iterable

    train, *held_out = batches.build_data(experiment, allowed=allowed)
    order = batches.train_order(experiment, train, allowed=allowed)
    named = zip(("validation", "test"), held_out, strict=True)
    validation, test = (batches.held_out_size(experiment, one, what=name) for name, one in named)
    size, notes = None if order.is_endless else order.set_size, iterable.notes(train, experiment)
    return DataSizes(size, validation, order.steps_per_epoch, test, order.samples, notes)


def find_parameter_problems(
    experiment: Experiment, *, allowed: tuple[str, ...], with_weights: bool = True
) -> list[Problem]:
    """Find patterns that match no parameter, and weights that don't exist or don't fit, on a model without memory."""
    start, initial = experiment.train.start_from, None
    try:
        initial = find_initial(experiment) if with_weights else None
    except ExperimentError as error:
        problems = list(error.problems)
    else:
        problems = []
    names = bool(experiment.optimizers or (experiment.optimizer is not None and experiment.optimizer.groups))
    if initial is None and not experiment.train.freeze and not names:
        return problems
    if (trainee := _outline(experiment, allowed=allowed, with_task=names)) is None:
        return problems
    from pipeline.train import optim, weights

    if start is not None and initial is not None:
        problems += refusals(lambda: weights.fit(trainee.get_submodule("model"), start, initial))
    problems += refusals(lambda: optim.freeze(trainee, experiment.train.freeze))
    return problems + refusals(lambda: optim.divide(experiment, trainee))


def _outline(experiment: Experiment, *, allowed: tuple[str, ...], with_task: bool) -> "nn.Module | None":
    """Build the model without memory for its parameters; None if that is not possible."""
    with undisturbed():
        from pipeline.train.parts import outline

    try:
        filled = references.fill_in(experiment)
        return outline(partial(components.build, allowed=allowed), filled, with_task=with_task)
    except Exception as error:  # noqa: BLE001 - user code; the workers raise what remains
        _log.info("the model can't be built without memory, so it is checked later", exc_info=error)
        return None


def _find_strategy_problems(experiment: Experiment) -> Iterator[Problem]:
    for key, entry in (("parallel", experiment.parallel), ("benchmark.baseline", experiment.benchmark.baseline)):
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
            for problem in find_problems(error, strategy.Options, entry.options):
                yield problem._replace(key=f"{key}.options.{problem.key}")


def _find_metric_problems(experiment: Experiment, *, allowed: tuple[str, ...]) -> list[Problem]:
    """Find metrics that can't be built, and those that are followed but don't know which direction is better."""
    try:
        built = judges(experiment, allowed=allowed)
    except ExperimentError as error:
        return list(error.problems)
    checkpoint, stopping, searched = experiment.checkpoint, experiment.train.early_stopping, experiment.sweep
    followed = [("checkpoint.best", checkpoint.best, checkpoint.mode)]
    if stopping is not None:
        followed.append(("train.early_stopping.metric", stopping.metric, stopping.mode))
    if searched is not None:
        followed.append(("sweep.metric", searched.metric, searched.mode))
    problems: list[Problem] = []
    for key, metric, mode in followed:
        if metric is not None:
            problems += refusals(partial(direction_of, metric, mode, key=key, judges=built))
    if (scheduler := experiment.scheduler) is not None and scheduler.target.endswith(".ReduceLROnPlateau"):
        from pipeline.train import schedules

        plateau = str(scheduler.arguments.get("mode", "min"))
        problems += refusals(lambda: schedules.check_plateau(plateau, experiment.train, judges=built))
    return problems


def find_reason_to_skip(experiment: Experiment, *, allowed: tuple[str, ...]) -> str:
    """Return why an experiment can't be tried in a process of this machine, in a sentence; empty if it can."""
    parallel = experiment.parallel
    if parallel.launcher == "ray" and parallel.cluster:
        return f"The experiment runs on the Ray cluster at {parallel.cluster}."
    model, needed = _outline(experiment, allowed=allowed, with_task=False), 0
    for parameter in model.parameters() if model is not None else ():
        copies = 4 if parameter.requires_grad else 1  # with its gradient, and two values of Adam
        needed += parameter.numel() * parameter.element_size() * copies
    free = min([psutil.virtual_memory().available, *(limit.free for limit in find_memory_limits())])
    if parallel.device != "cpu" and resources.detect().gpus:
        import torch

        free = int(torch.cuda.mem_get_info()[0])
    if needed > free / 2:
        sizes = f"{needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"
        return f"Weights, gradients and optimizer state take {sizes}."
    return ""


def try_steps(file: ExperimentFile, *, allowed: tuple[str, ...], receive: Callable[[AnyEvent], None]) -> None:
    """Take the first steps of a training and evaluate, on two samples; after an error on a worker's whole batch."""
    from pipeline.launch.inprocess import Launcher  # and torch with it

    with explain_problems(file):
        planned = _plan_check(file.experiment, resources.detect(), allowed=allowed)
        for samples in sorted({min(2, planned.samples), planned.samples}):
            session = Session(folder=Path(), receive=receive, parallel=planned.experiment.parallel)
            with Launcher(session) as launcher:
                outcome = launcher.launch(planned.model_copy(update={"samples": samples}))
            if not outcome.has_failed:
                return
            if outcome.started is None:
                break
        raise outcome.error


def _plan_check(experiment: Experiment, here: Resources, *, allowed: tuple[str, ...]) -> BatchCheck:
    """Plan the check, with as many samples as a worker gets."""
    planned: Trial | None = None
    try:
        planned = make_plan(experiment, here, allowed=allowed).main
    except ResourceError:  # it is meant for another machine
        pass
    except ExperimentError:  # as may be this one
        make_plan(experiment, here.model_copy(update={"cpus": _MANY, "gpus": ("GPU",) * _MANY}))
    train, uses_gpu = experiment.train, bool(here.gpus) and experiment.parallel.device != "cpu"
    share = -(-train.global_batch_size // (experiment.parallel.workers * train.gradient_accumulation))
    return BatchCheck(
        name="check",
        # Compiling takes longer than all else.
        experiment=experiment.model_copy(update={"train": train.model_copy(update={"compile": None})}),
        strategy=planned.strategy if planned else "single",
        options=planned.options if planned else {},
        launcher="inprocess",
        workers=1,
        devices_per_worker=int(uses_gpu),
        device="cuda" if uses_gpu else "cpu",
        cpus_per_worker=min(here.cpus, here.threads or here.cpus),
        allowed=allowed,
        initial=find_initial(experiment),
        samples=share,
        most_samples=share,
    )

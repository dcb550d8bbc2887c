"""Plan of a sweep: its trials with their values, the cores of each, and how many run concurrently.

The values of a trial are a pure function of the sweep's seed, the number of the draw, and the key.
"""

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from pipeline.commands.preparation import planning
from pipeline.commands.study_trials.assignment import Record
from pipeline.drive.directions import judges, sweep_direction
from pipeline.errors import Problem, ResourceError, refusals
from pipeline.experiment.load import ExperimentFile
from pipeline.experiment.sweep import Parameter, Sweep
from pipeline.experiment.values import Direction
from pipeline.plan.plan import Plan, make_plan
from pipeline.plan.resources import Resources
from pipeline.protocol.trial import Trial
from pipeline.wording import counted

_CPUS, _ADDRESS, _LOG_MODEL = "parallel.cpus_per_worker", "parallel.address", "tracking.log_model"
_DIGITS = 4


@dataclass(frozen=True)
class SweepPlan:
    """Plan of a sweep."""

    sweep: Sweep
    direction: Direction
    """Direction in which the sweep's metric improves."""
    file: ExperimentFile
    """Experiment of all trials, without the values of each."""
    concurrent: int
    """Number of concurrent trials."""
    seed: int
    suggestions: tuple[Record, ...]
    """Trials in order, as far as they are known; empty with Optuna."""
    epochs: int
    """Largest number of epochs of a trial."""
    logs_models: bool
    """True if each trial's model goes to the tracking store, as ``tracking.log_model: true`` in the file asks; else
    only the best trial's model does."""
    plan: Plan
    """Plan for the run's folder and the tracking store."""

    @property
    def resources(self) -> dict[str, float]:
        """Resources of this machine that a trial needs."""
        return find_needs(self.plan.main)


def make(file: ExperimentFile) -> SweepPlan:
    """Check the file and all values of its sweep, and plan the trials; for the errors see `planning`."""
    sweep = sweep_of(file)
    common: dict[str, Any] = {}
    with planning(file) as (allowed, resources):
        direction = sweep_direction(sweep, judges(file.experiment, allowed=allowed))
        concurrent, cpus = find_concurrency(file, resources, allowed=allowed, total=sweep.total, asked=sweep.concurrent)
        common[_CPUS] = cpus
        busy = [f"{note} For more, set sweep.concurrent." for note in describe_busy(resources, concurrent=concurrent)]
        parallel = file.experiment.parallel
        if parallel.launcher == "ray" and parallel.cluster is not None:
            common[_ADDRESS] = parallel.cluster  # RAY_ADDRESS may be where it stands
        varied = file.vary(common)
        plan = make_plan(varied.experiment, resources, allowed=allowed, with_baseline=False)
    seed = file.experiment.seed if sweep.seed is None else sweep.seed
    suggestions = tuple(_suggestions(file, sweep, seed=seed))
    epochs = sweep.parameters.get("train.epochs")
    return SweepPlan(
        sweep=sweep,
        direction=direction,
        file=varied,
        concurrent=concurrent,
        seed=seed,
        suggestions=suggestions,
        epochs=max(epochs.candidates) if epochs else file.experiment.train.epochs or 0,
        logs_models=_LOG_MODEL in file.places.entries and file.experiment.tracking.log_model,
        plan=plan.model_copy(update={"command": "sweep", "experiment": file.experiment, "notes": (*plan.notes, *busy)}),
    )


def sweep_of(file: ExperimentFile) -> Sweep:
    """Return the section ``sweep`` of the file.

    Raises:
        ExperimentError: it is missing.
    """
    if file.experiment.sweep is None:
        example = "sweep: {parameters: {optimizer.lr: {log_uniform: [1e-4, 1e-1]}}, trials: 8}"
        raise file.explain([Problem("sweep", f"missing. Write the values to try, e.g. {example}")])
    if file.experiment.parallel.is_elastic:
        message = f"is {list(file.experiment.parallel.worker_counts)}. Trials share the machine, so use one number."
        raise file.explain([Problem("parallel.workers", message)])
    return file.experiment.sweep


def describe(plan: SweepPlan) -> str:
    """Describe a plan in lines."""
    trial, sweep = plan.plan.main, plan.sweep
    lines = [
        f"sweep        {_count(sweep)}, ranked by {sweep.metric} ({_good(plan.direction)})",
        *(f"             {key}: {parameter}" for key, parameter in sweep.parameters.items()),
        f"search       {sweep.search}, seed {plan.seed}{_asha(sweep, epochs=plan.epochs)}",
        f"machine      {plan.plan.resources.summary}",
        f"concurrent   {counted(plan.concurrent, 'trial')}, each {trial.title} with {trial.launcher}, {_device(trial)}",
        f"tracking     {plan.plan.experiment.tracking.uri}",
    ]
    lines += [f"  {each.title}" for each in plan.suggestions]
    return "\n".join(lines)


def in_a_line(file: ExperimentFile, *, allowed: tuple[str, ...]) -> str:
    """Describe a sweep in a line for ``pipeline check``, without the number of concurrent trials."""
    sweep = sweep_of(file)
    keys = ", ".join(f"{key} ({parameter})" for key, parameter in sweep.parameters.items())
    direction = sweep_direction(sweep, judges(file.experiment, allowed=allowed))
    return f"sweep of {_count(sweep)} over {keys}, ranked by {sweep.metric} ({_good(direction)})"


def _good(direction: Direction) -> str:
    return "lower is better" if direction == "min" else "higher is better"


def find_concurrency(
    file: ExperimentFile, resources: Resources, *, allowed: tuple[str, ...], total: int, asked: int | None = None
) -> tuple[int, int]:
    """Return the number of concurrent trials, and the cores of each of their workers.

    Many concurrent trials with few cores finish earlier than consecutive trials with many; idle cores are distributed.
    On a cluster, only what is free now counts, unless ``sweep.concurrent`` asks for more: others use it, too. Where an
    autoscaler can add nodes, it may ask for more than there is.
    """
    parallel = file.experiment.parallel
    least = file.vary({_CPUS: parallel.cpus_per_worker or 1}).experiment
    trial = make_plan(least, resources, allowed=allowed, with_baseline=False).main
    side_by_side = resources.cpus // resources.nodes // trial.cpus_per_worker * resources.nodes
    if trial.devices_per_worker:
        side_by_side = min(side_by_side, len(resources.gpus) // trial.devices_per_worker)
    fit = max(1, side_by_side // trial.workers)  # `make_plan` has checked that one trial does
    if asked is not None and asked > fit and not resources.is_autoscaled:
        raise ResourceError(
            f"sweep.concurrent: {asked} trials of {counted(trial.workers, 'worker')} with {_device(trial)} "
            f"don't fit at the same time. {resources.node} has {resources.summary}. Use at most {fit}."
        )
    free = max(1, _count_free(trial, resources) // trial.workers) if resources.idle else fit
    concurrent = min(asked or min(fit, free), total)
    on_a_node = -(-concurrent * trial.workers // resources.nodes)
    most = max(1, resources.cpus // resources.nodes // on_a_node)
    if parallel.cpus_per_worker or not resources.idle:
        return concurrent, parallel.cpus_per_worker or most
    wider = (trial.model_copy(update={"cpus_per_worker": cpus}) for cpus in range(most, 1, -1))
    fitting = (one for one in wider if _count_free(one, resources) >= concurrent * trial.workers)
    return concurrent, next(fitting, trial).cpus_per_worker


def shares_cluster(file: ExperimentFile) -> bool:
    """Return True if the trials' workers run on a cluster, where other jobs may have taken their resources."""
    parallel = file.experiment.parallel
    return parallel.launcher == "ray" and parallel.address is not None


def find_needs(trial: Trial) -> dict[str, float]:
    """Return the resources of this machine that a trial needs; none if its workers run on a cluster."""
    parallel = trial.experiment.parallel
    if parallel.launcher == "ray" and parallel.address is not None:
        return {"node:__internal_head__": 1e-4}  # Ray wants something to be asked for
    amounts = {"CPU": trial.workers * trial.cpus_per_worker, "GPU": trial.workers * trial.devices_per_worker}
    return {name: amount for name, amount in amounts.items() if amount}


def _count_free(trial: Trial, resources: Resources) -> int:
    """Return the number of workers that fit into what is free on a cluster's nodes."""
    from pipeline.launch.cluster import count_fitting, per_worker  # loads Ray

    return sum(count_fitting(node, per_worker(trial)) for node in resources.idle)


def describe_busy(resources: Resources, *, concurrent: int) -> Iterator[str]:
    """Yield a note if other jobs occupy a part of the cluster."""
    totals = {"CPU": resources.cpus, "GPU": len(resources.gpus)}
    free = {name: sum(node.get(name, 0) for node in resources.idle) for name in totals}
    if resources.idle and any(free[name] < total for name, total in totals.items()):
        parts = (f"{free[name]:g} of {total} {name}" for name, total in totals.items() if total)
        yield (
            f"{resources.node}: {', '.join(parts)} free now, so at most {counted(concurrent, 'training')} at a time; "
            "each waits for room."
        )


def _suggestions(file: ExperimentFile, sweep: Sweep, *, seed: int) -> list[Record]:
    """Draw the values of all trials, as far as they are known before the first result.

    Raises:
        ExperimentError: the experiment refuses values in this combination.
    """
    if sweep.search != "random":
        return []
    drawn = [Record(number=number, values=values) for number, values in enumerate(draws(sweep, seed=seed), 1)]
    wrong = [
        Problem("sweep.parameters", f"{each.title}: {problem.key}: {problem.message}")
        for each in drawn
        for problem in refusals(partial(file.vary, each.values))
    ]
    if wrong:
        raise file.explain(wrong)
    return drawn


def _count(sweep: Sweep) -> str:
    total = counted(sweep.total, "trial")
    if sweep.combinations == 1 or sweep.trials == 1:
        return total
    return f"{total} ({sweep.trials} draws x {sweep.combinations} combinations of the grids)"


def _asha(sweep: Sweep, *, epochs: int) -> str:
    if sweep.asha is None:
        return ""
    grace, factor = sweep.asha.grace_epochs, sweep.asha.reduction_factor
    rungs = []
    while grace < epochs:
        rungs.append(str(grace))
        grace *= factor
    return f"; ASHA continues 1 in {factor} trials after epoch {', '.join(rungs)} of {epochs}"


def _device(trial: Trial) -> str:
    cores = f"{counted(trial.cpus_per_worker, 'core')} each"
    return f"{counted(trial.devices_per_worker, 'GPU')} and {cores}" if trial.devices_per_worker else cores


def draws(sweep: Sweep, *, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the values of all trials: for each draw, all combinations of the grids, the last grid varying fastest.

    A larger ``sweep.trials`` appends trials without changing earlier ones.
    """
    grids = sweep.grids
    for draw in range(sweep.trials):
        drawn = {key: _drawn(one, f"{seed}/{draw}/{key}") for key, one in sweep.parameters.items() if key not in grids}
        for combination in itertools.product(*grids.values()):
            values = {**drawn, **dict(zip(grids, combination, strict=True))}
            yield {key: values[key] for key in sweep.parameters}


def rounded(parameter: Parameter, value: Any) -> Any:
    """Round a fractional number to four significant digits, within its range."""
    ends = parameter.uniform or parameter.log_uniform
    if ends is None:
        return value
    return min(max(float(f"{value:.{_DIGITS}g}"), ends[0]), ends[1])


def _drawn(parameter: Parameter, key: str) -> Any:
    source = random.Random(key)  # noqa: S311 - nothing secret; seeded with a text, it is the same everywhere
    if parameter.choice is not None:
        return source.choice(parameter.choice)
    if parameter.int_uniform is not None:
        return source.randint(*parameter.int_uniform)
    if parameter.int_log_uniform is not None:
        low, high = parameter.int_log_uniform
        return min(int(_log_uniform(source, low, high + 1)), high)
    if parameter.log_uniform is not None:
        return rounded(parameter, _log_uniform(source, *parameter.log_uniform))
    assert parameter.uniform is not None  # the file was checked
    return rounded(parameter, source.uniform(*parameter.uniform))


def _log_uniform(source: random.Random, low: float, high: float) -> float:
    return math.exp(source.uniform(math.log(low), math.log(high)))

"""What a sweep will do: which trials, each with how many cores, and how many of them side by side."""

from collections.abc import Mapping
from typing import Any

from pipeline.commands.invocation import planning
from pipeline.commands.sweep.assignment import Suggestion
from pipeline.commands.sweep.sampling import draws, titled
from pipeline.config.load import ExperimentFile
from pipeline.config.summary import config_hash
from pipeline.config.sweep import Sweep
from pipeline.config.values import Direction, Frozen
from pipeline.driver import preflight
from pipeline.errors import ExperimentError, Problem, ResourceError
from pipeline.planning.plan import Plan, make_plan
from pipeline.planning.resources import Resources
from pipeline.protocol.trial import Trial
from pipeline.wording import counted

_CPUS, _LOG_MODEL = "parallel.cpus_per_worker", "tracking.log_model"


class SweepPlan(Frozen):
    """A sweep, decided."""

    sweep: Sweep
    direction: Direction
    """Of the sweep's metric: which values are good."""
    trial: Trial
    """Each of them, but for its values."""
    common: Mapping[str, Any]
    """Values that all trials have besides the file's, by dotted key."""
    concurrent: int
    """Trials that run at the same time."""
    seed: int
    suggestions: tuple[Suggestion, ...]
    """The trials in order, as far as they are decided: with Optuna, none."""
    epochs: int
    """The most that a trial has."""
    logs_models: bool
    """Whether each trial's model goes to the tracking store, as ``tracking.log_model: true`` in the file says; left
    out, the best one's does."""
    plan: Plan
    """For the run's folder and the tracking store."""

    @property
    def resources(self) -> dict[str, float]:
        """What a trial occupies of this machine; nothing if a cluster's nodes have its workers."""
        if "parallel.address" in self.common:
            return {"node:__internal_head__": 1e-4}  # Ray wants something to be asked for
        trial = self.trial
        amounts = {"CPU": trial.workers * trial.cpus_per_worker, "GPU": trial.workers * trial.devices_per_worker}
        return {name: amount for name, amount in amounts.items() if amount}


def make(file: ExperimentFile) -> SweepPlan:
    """Check the file and all values of its sweep, and plan the trials; for the errors see `planning`."""
    sweep = sweep_of(file)
    common: dict[str, Any] = {}
    with planning(file) as (allowed, resources):
        direction = preflight.sweep_direction(sweep, preflight.judges(file.experiment, allowed=allowed))
        concurrent, cpus = _side_by_side(file, resources, allowed)
        common[_CPUS] = cpus
        if (address := _address(file)) is not None:
            common["parallel.address"] = address  # RAY_ADDRESS may be where it stands
        one = make_plan(file.varied(common).experiment, resources, allowed=allowed, with_baseline=False)
    seed = file.experiment.seed if sweep.seed is None else sweep.seed
    suggestions = tuple(_suggestions(file, sweep, seed=seed, common=common))
    varied = sweep.parameters.get("train.epochs")
    return SweepPlan(
        sweep=sweep,
        direction=direction,
        trial=one.main,
        common=common,
        concurrent=concurrent,
        seed=seed,
        suggestions=suggestions,
        epochs=max(varied.candidates) if varied else file.experiment.train.epochs,
        logs_models=_LOG_MODEL in file.places.entries and file.experiment.tracking.log_model,
        plan=one.model_copy(update={"command": "sweep", "experiment": file.experiment}),
    )


def sweep_of(file: ExperimentFile) -> Sweep:
    """The section of the file.

    Raises:
        ExperimentError: there is none.
    """
    if file.experiment.sweep is None:
        example = "sweep: {parameters: {optimizer.lr: {log_uniform: [1e-4, 1e-1]}}, trials: 8}"
        raise file.explain([Problem("sweep", f"missing; write what to try, e.g. {example}")])
    if file.experiment.parallel.is_elastic:
        message = f"is {list(file.experiment.parallel.worker_counts)}; trials share the machine, write one number"
        raise file.explain([Problem("parallel.workers", message)])
    return file.experiment.sweep


def identified(file: ExperimentFile, suggestion: Suggestion, *, common: Mapping[str, Any]) -> tuple[Suggestion, str]:
    """A suggestion with what is wrong with its values together, if anything is, and the hash of its experiment."""
    try:
        return suggestion, config_hash(file.varied({**common, **suggestion.values}).experiment)
    except ExperimentError as error:
        problem = "; ".join(f"{one.key}: {one.message}" for one in error.problems)
        return suggestion.model_copy(update={"problem": problem}), ""


def describe(plan: SweepPlan) -> str:
    """The plan in words."""
    trial, sweep = plan.trial, plan.sweep
    lines = [
        f"sweep        {_count(sweep)}, by {sweep.metric}, {_good(plan.direction)}",
        *(f"             {key}: {parameter}" for key, parameter in sweep.parameters.items()),
        f"search       {sweep.search}, seed {plan.seed}{_asha(sweep, epochs=plan.epochs)}",
        f"machine      {plan.plan.resources.summary}",
        f"side by side {counted(plan.concurrent, 'trial')}, each {trial.title} with {trial.launcher}: "
        f"{counted(trial.workers, 'worker')}, {_device(trial)}",
        f"tracking     {plan.plan.experiment.tracking.uri}",
    ]
    lines += [f"  {titled(each.number, each.values)}" for each in plan.suggestions]
    return "\n".join(lines)


def in_a_line(file: ExperimentFile, *, allowed: tuple[str, ...]) -> str:
    """What ``pipeline check`` says of a sweep; on a cluster only the cluster knows how many fit side by side."""
    sweep = sweep_of(file)
    keys = ", ".join(f"{key} ({parameter})" for key, parameter in sweep.parameters.items())
    direction = preflight.sweep_direction(sweep, preflight.judges(file.experiment, allowed=allowed))
    return f"sweep of {_count(sweep)} over {keys}; {sweep.metric}, {_good(direction)}"


def _good(direction: Direction) -> str:
    return "small is good" if direction == "min" else "large is good"


def _address(file: ExperimentFile) -> str | None:
    """Of the cluster that workers are placed on."""
    if file.experiment.parallel.launcher != "ray":
        return None
    from pipeline.cluster.join import cluster_address

    return cluster_address(file.experiment.parallel)


def _side_by_side(file: ExperimentFile, resources: Resources, allowed: tuple[str, ...]) -> tuple[int, int]:
    """Trials at the same time, and cores for each of their workers.

    With few cores each, more trials are done in the same time than with many one after the other; cores that would be
    idle are dealt out.
    """
    sweep, parallel = sweep_of(file), file.experiment.parallel
    least = file.varied({_CPUS: parallel.cpus_per_worker or 1}).experiment
    trial = make_plan(least, resources, allowed=allowed, with_baseline=False).main
    fit = _fit(trial, resources)
    if sweep.concurrent is not None and sweep.concurrent > fit:
        raise ResourceError(
            f"sweep.concurrent: {sweep.concurrent} trials of {counted(trial.workers, 'worker')} with {_device(trial)} "
            f"don't fit side by side; {resources.node} has {resources.summary}, write at most {fit}"
        )
    concurrent = min(sweep.concurrent or fit, sweep.total)
    on_a_node = -(-concurrent * trial.workers // resources.nodes)
    return concurrent, parallel.cpus_per_worker or max(1, resources.cpus // resources.nodes // on_a_node)


def _fit(trial: Trial, resources: Resources) -> int:
    """How many of these trials fit side by side; at least one does, as `make_plan` has found."""
    workers = resources.cpus // resources.nodes // trial.cpus_per_worker * resources.nodes
    if trial.devices_per_worker:
        workers = min(workers, len(resources.gpus) // trial.devices_per_worker)
    return max(1, workers // trial.workers)


def _suggestions(file: ExperimentFile, sweep: Sweep, *, seed: int, common: Mapping[str, Any]) -> "list[Suggestion]":
    if sweep.search != "random":
        return []
    drawn = [Suggestion(number=number, values=values) for number, values in enumerate(draws(sweep, seed=seed), 1)]
    wrong = [one for each in drawn if (one := identified(file, each, common=common)[0]).problem]
    if wrong:
        raise file.explain(
            [Problem("sweep.parameters", f"{titled(one.number, one.values)}: {one.problem}") for one in wrong]
        )
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
    return f"; ASHA: 1 in {factor} goes on after epoch {', '.join(rungs)} of {epochs}"


def _device(trial: Trial) -> str:
    cores = f"{counted(trial.cpus_per_worker, 'core')} each"
    return f"{counted(trial.devices_per_worker, 'GPU')} and {cores}" if trial.devices_per_worker else cores

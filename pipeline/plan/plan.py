"""Plan of a command: the trials that an experiment needs on a machine, by pure functions of both; its description."""

import json
import os
from collections.abc import Iterator
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeVar

import yaml

from pipeline import registry
from pipeline.errors import ExperimentError, ResourceError
from pipeline.experiment import references
from pipeline.experiment.schema import LIGHTNING_OPTIMIZER, Configuration, Experiment
from pipeline.experiment.uris import describe_origin, without_credentials
from pipeline.experiment.values import Frozen
from pipeline.plan.outer_launcher import find_ignored_ranks
from pipeline.plan.resources import Resources
from pipeline.protocol.trial import Baseline, Reference, Training, Trial
from pipeline.wording import counted

_LENGTHS = ("step_size", "milestones", "T_max", "T_0", "total_iters")
"""Arguments of torch's schedulers that count their advances."""
_FACTOR = 0.99  # Factor of a rate after each step that leaves less than a thousandth of it after 700 steps

T = TypeVar("T", bound=Trial)


class Plan(Frozen):
    """Trials of a command, in order."""

    command: Literal["run", "benchmark", "compare", "sweep", "evaluate"] = "run"
    experiment: Experiment
    resources: Resources
    trials: tuple[Trial, ...]
    notes: tuple[str, ...] = ()

    @property
    def main(self) -> Trial:
        """The training; the first trial if the command only measures."""
        return next((trial for trial in self.trials if isinstance(trial, Training)), self.trials[0])

    @property
    def measured(self) -> tuple[Trial, ...]:
        """All trials that have a result: those that are launched, and those that the training is compared with."""
        beside = (trial.compared_with for trial in self.trials if isinstance(trial, Training))
        return (*self.trials, *chain.from_iterable(beside))


class Planner:
    """Planner of one experiment's trials, which all have the same device and the same cores for each worker."""

    def __init__(
        self, experiment: Experiment, resources: Resources, allowed: tuple[str, ...], *, workers: int | None = None
    ) -> None:
        """Divide each node's cores among ``workers``, by default those that the experiment asks for."""
        self._experiment, self._resources, self._allowed = experiment, resources, allowed
        parallel = experiment.parallel
        if parallel.device == "cuda" and not resources.gpus and not resources.is_autoscaled:
            raise ResourceError(
                f"parallel.device: cuda needs a GPU. {resources.node} has {resources.summary}. Use auto or cpu."
            )
        self.device: Literal["cpu", "cuda"] = "cuda" if resources.gpus else "cpu"
        if parallel.device != "auto":
            self.device = parallel.device
        self.workers = workers or parallel.workers
        if resources.placed:
            self.share = max(1, min(node.cpus // node.workers for node in resources.placed))
        else:  # a worker's cores are on one node
            self.share = max(1, resources.cpus // resources.nodes // -(-self.workers // resources.nodes))
        self.cpus = parallel.cpus_per_worker or min(self.share, resources.threads or self.share)
        self.room = sum(node.workers for node in resources.placed) or min(
            resources.cpus // self.cpus,
            len(resources.gpus) if self.device == "cuda" else self.workers,
            resources.nodes if parallel.placement == "strict_spread" else self.workers,
        )
        if workers is None and parallel.is_elastic:
            self.workers = max(parallel.least_workers, min(self.workers, self.room))

    def trial(self, kind: type[T], entry: Configuration, *, key: str = "parallel", **own: object) -> T:
        """Return the trial of an entry, which the file has at ``key``, with its role's ``own`` fields."""
        parallel, train = self._experiment.parallel, self._experiment.train
        strategy = registry.load("strategies", entry.strategy).Strategy
        workers = entry.workers or (parallel.workers if strategy.processes == "many" else 1)
        if workers > 1 and not registry.load("launchers", parallel.launcher).Launcher.many_processes:
            raise ExperimentError.of(
                f"{key}.workers",
                f"is {workers}, but {parallel.launcher} runs one process. Set parallel.launcher to torchrun or ray.",
            )
        if reason := strategy.refuse(strategy.Options.model_validate(entry.options), device=self.device):
            raise ExperimentError.of(f"{key}.options", reason)
        gpus, wanted = 1, parallel.gpus_per_worker
        if strategy.devices == "all":
            gpus = wanted or max(1, len(self._resources.gpus) // self._resources.nodes)
        elif key == "parallel" and (wanted or 1) > 1:
            raise ExperimentError.of(
                "parallel.gpus_per_worker",
                f"is {wanted}, but {entry.strategy} uses one GPU per worker. Set parallel.workers instead.",
            )
        layout = {
            "name": kind.model_fields["role"].default,
            "experiment": self._experiment,
            "strategy": entry.strategy,
            "options": entry.options,
            "launcher": parallel.launcher,
            "workers": workers,
            "devices_per_worker": gpus if self.device == "cuda" else 0,
            "device": self.device,
            "cpus_per_worker": self.cpus,
            "allowed": self._allowed,
        }
        trial = kind.model_validate(layout | own)
        if train.compile is not None and self.device == "cpu" and not self._resources.has_compiler:
            raise ResourceError(
                "train.compile: no C++ compiler found, and compiling for the CPU needs one. Install g++, or set the "
                "environment variable CXX to your compiler, or set train.compile to false."
            )
        if trial.strategy == "dp" and trial.replicas > 1 and train.compile is not None:
            raise ExperimentError.of(
                f"{key}.strategy",
                "dp copies the model in each step, which torch.compile does not support. Use ddp, or compile: false.",
            )
        self._check_room(trial)
        return trial

    def reference(self) -> Reference:
        """Return the trial of one process with all the cores; for the errors see `trial`."""
        return self.trial(Reference, Configuration(strategy="single"), cpus_per_worker=self.cpus * self.workers)

    def _check_room(self, trial: Trial) -> None:
        """Refuse a trial that doesn't fit, rather than run it with fewer workers."""
        there = self._resources
        workers, cores = counted(trial.workers, "worker"), counted(trial.cpus_per_worker, "core")
        if trial.workers > 1 and trial.workers == sum(node.workers for node in there.placed):
            for node in there.placed:
                if trial.cpus_per_worker * node.workers > node.cpus:
                    raise ResourceError(
                        f"parallel.workers: {counted(node.workers, 'worker')} with {cores} each were started on "
                        f"{node.node}, where they may use {counted(node.cpus, 'core')}. Start fewer workers there, or "
                        "give them more cores."
                    )
        if there.is_autoscaled:  # nodes may be added
            return
        has = f"{there.node} has {there.summary}."
        if (gpus := trial.devices_per_worker * trial.workers) > len(there.gpus):
            key, what, fewer = "workers", workers, "workers"
            if trial.devices_per_worker > 1:
                key, what, fewer = "gpus_per_worker", f"{workers} with {trial.devices_per_worker} GPUs each", "GPUs"
            raise ResourceError(f"parallel.{key}: {what} need {gpus} GPUs. {has} Use fewer {fewer}, or device: cpu.")
        if (needed := trial.cpus_per_worker * trial.workers) > there.cpus:
            fit = there.cpus // trial.cpus_per_worker
            remedy = f"Use at most {counted(fit, 'worker')}" if fit else f"Set parallel.cpus_per_worker to {there.cpus}"
            raise ResourceError(f"parallel.workers: {workers} with {cores} each need {needed} cores. {has} {remedy}.")


def make_plan(
    experiment: Experiment,
    resources: Resources,
    *,
    allowed: tuple[str, ...] = (),
    with_baseline: bool = True,
    train_only: bool = False,
    quick: bool = False,
) -> Plan:
    """Plan the trials of ``pipeline run``; with ``train_only`` nothing is measured beside or after the training.

    With ``quick`` the training ends after a few timed steps, and nothing is measured either.

    The baseline gets the same cores for its one worker that each worker of the main trial has, so that N workers have
    N times the cores. On CPU a reference shows what one process with all those cores does. Both are measured in turn
    with the main trial by its rank 0; a baseline that can't run in one process is measured before. An elastic main
    trial has as many workers here as fit now; how many it begins with is decided when it is launched.
    """
    planner, parallel = Planner(experiment, resources, allowed), experiment.parallel
    own = Configuration(strategy=parallel.strategy, workers=planner.workers, options=parallel.options)
    train_only = train_only or quick
    main = planner.trial(Training, own, train_only=train_only, is_quick=quick)
    others: list[Baseline | Reference] = []
    if with_baseline and not train_only:
        baseline = planner.trial(Baseline, experiment.benchmark.baseline, key="benchmark.baseline")
        others += [] if same_work(baseline, main) else [baseline]
        if main.device == "cpu" and main.workers > 1 and resources.is_one_node and not resources.is_divided:
            others.append(planner.reference())
    notes = [*_find_notes(main, planner, resources)]
    if with_baseline and not train_only and not any(isinstance(trial, Baseline) for trial in others):
        notes.append(f"The training run is the baseline ({main.title}), so no speedup is measured.")
    beside, before = [], []
    # For their losses; slots have their own steps.
    first_steps = {"max_steps": experiment.benchmark.warmup_steps + experiment.benchmark.steps}
    for trial in others:
        needs_group = registry.load("strategies", trial.strategy).Strategy.needs_process_group
        # Not beside: dp has more devices than a rank of ddp.
        if trial.workers == 1 and not needs_group and trial.devices_per_worker <= main.devices_per_worker:
            beside.append(trial.model_copy(update=first_steps))
        else:
            before.append(trial)
    main = main.model_copy(update={"compared_with": tuple(beside)})
    return Plan(experiment=experiment, resources=resources, trials=(*before, main), notes=tuple(notes))


def same_work(one: Trial, other: Trial) -> bool:
    """Return True if two trials of an experiment distribute the work in the same way."""
    return (one.strategy, one.workers, one.options) == (other.strategy, other.workers, other.options)


def restriction(trial: Trial) -> str:
    """Return the note on a training that measures nothing; empty for other trials."""
    if not isinstance(trial, Training) or not trial.train_only:
        return ""
    if trial.is_quick:
        return f"--quick: {trial.quick_steps} steps, one evaluation and one checkpoint. The model is not trained"
    return "--train-only: no speedup, no step-time breakdown, no recommendations"


def _find_notes(main: Training, planner: Planner, resources: Resources) -> Iterator[str]:
    """Yield what the user should know of the experiment, the machine and its environment variables."""
    train, parallel, tracking = main.experiment.train, main.experiment.parallel, main.experiment.tracking
    if note := restriction(main):
        yield note
    if main.device == "cpu" and parallel.device == "auto":
        yield "No GPU found. Training on the CPU."
    if main.strategy == "dp" and main.replicas < 2:
        yield "DataParallel (dp) needs at least 2 GPUs. With fewer, it runs a single replica and gives no speedup."
    if main.strategy == "fsdp" and main.workers < 2:
        yield "fsdp with one worker shards nothing and saves no memory."
    if train.batch_size_per_worker is not None:
        yield (
            f"The global batch size is {train.global_batch_size} (train.batch_size_per_worker x parallel.workers). The "
            "baseline uses the same size. The size stays the same if the run is resumed with another number of workers."
        )
    yield from scheduler_units(main.experiment)
    if main.experiment.sweep is not None:
        yield "This run uses the values of the file. To search the values of its sweep section, use pipeline sweep."
    if (room := planner.room if resources.is_autoscaled else main.workers) < parallel.workers:
        more = " The cluster's autoscaler may add nodes." if resources.is_autoscaled else ""
        yield f"Room for {room} of {parallel.workers} workers is free.{more}"
    if parallel.cpus_per_worker is None and planner.cpus < planner.share:
        yield (
            f"OMP_NUM_THREADS={resources.threads}: each worker has {counted(planner.cpus, 'thread')}, and there is "
            f"room for {planner.share}. To use them, set parallel.cpus_per_worker={planner.share}."
        )
    if ranks := find_ignored_ranks():
        yield (
            f"{ranks}: ignored, because torchrun or srun did not start this process. It trains alone, without "
            "the other processes of the platform. To train in all of them together, start pipeline with torchrun."
        )
    if parallel.launcher != "ray" and (address := os.environ.get("RAY_ADDRESS")):
        yield f"RAY_ADDRESS={address}: ignored. To train on this cluster, set parallel.launcher=ray."
    if tracking.experiment is None and (number := os.environ.get("MLFLOW_EXPERIMENT_ID")):
        yield f"MLFLOW_EXPERIMENT_ID={number}: ignored. Set tracking.experiment to the experiment's name in MLflow."
    if "working_dir" in os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", ""):
        places = {
            "tracking.directory": tracking.directory,
            "tracking.uri": tracking.uri.removeprefix("sqlite:///"),
            "checkpoint.directory": main.experiment.checkpoint.directory or "/",
        }
        for key, place in places.items():
            if "://" not in place and not place.startswith(("/", "~")):
                yield f"{key} is in the working directory of this Ray job, which Ray deletes. Set a lasting place."


def scheduler_units(experiment: Experiment) -> Iterator[str]:
    """Yield a note on each scheduler that advances after each step, with numbers that are no more than the epochs."""
    epochs = experiment.train.epochs
    if experiment.train.scheduler_interval != "step" or epochs is None:
        return
    experiment = references.fill_in(experiment, mode="show")
    own = {f"schedulers.{name}": one for name, one in experiment.schedulers.items()}
    for key, scheduler in ({"scheduler": experiment.scheduler} | own).items():
        for name, value in (scheduler.arguments if scheduler is not None else {}).items():
            counts = value if isinstance(value, list | tuple) else [value]
            said = ""
            if name in _LENGTHS and counts and all(isinstance(count, int) and count <= epochs for count in counts):
                said = f"{name} is {value}. This counts steps, because the scheduler advances after each step"
            is_gamma = name == "gamma" and scheduler is not None and scheduler.target.endswith(".ExponentialLR")
            if is_gamma and isinstance(value, float) and value <= _FACTOR:
                said = f"gamma is {value:g}. The learning rate is multiplied by gamma after each step"
            if said:
                yield f"{key}.{said}. To count epochs, set train.scheduler_interval to epoch"
                break


_OF_TRIAL = ("name", "role", "title", "strategy", "launcher", "workers", "device", "cpus_per_worker")


class DataSizes(NamedTuple):
    """Numbers of samples, and of steps in an epoch."""

    train_samples: int | None  # None for a training set without a length, of which ``train.steps`` is one epoch
    validation_samples: int
    steps_per_epoch: int
    test_samples: int = 0
    epoch_samples: int | None = None  # Samples of an epoch; None: as many as the training set has
    notes: tuple[str, ...] = ()  # Promises that the data can't keep, one sentence each


def describe(plan: Plan, sizes: DataSizes) -> str:
    """Describe a plan as YAML, without what doesn't apply."""
    shown = {key: value for key, value in _record(plan, sizes).items() if value is not None and value != []}
    shown["trials"] = [{key: value for key, value in trial.items() if value is not None} for trial in shown["trials"]]
    return yaml.safe_dump(shown, sort_keys=False, allow_unicode=True, width=110).rstrip()


def record(plan: Plan, sizes: DataSizes) -> str:
    """Describe a plan as JSON."""
    return json.dumps(_record(plan, sizes), indent=2)


def _record(plan: Plan, sizes: DataSizes) -> dict[str, Any]:
    experiment, train, tracking = plan.experiment, plan.experiment.train, plan.experiment.tracking
    registered = tracking.register_model
    alias = f" with alias {registered.alias}" if registered is not None and registered.alias else ""
    return {
        "experiment": experiment.name,
        "seed": experiment.seed,
        "machine": plan.resources.summary,
        **{key: value for key, value in sizes._asdict().items() if key != "notes"},
        "sampler": f"by {experiment.sampler.target}" if experiment.sampler is not None else None,
        "total_steps": train.steps_of(sizes.steps_per_epoch),
        "epochs": train.epochs,
        "steps": train.steps,
        "minutes": train.minutes,
        "global_batch_size": train.global_batch_size,
        "batch_size_per_worker": train.batch_size_per_worker,
        "gradient_accumulation": train.gradient_accumulation,
        "precision": train.precision,
        "model": experiment.model.target,
        "optimizers": list(_describe_optimizers(experiment)),
        "training": list(train.extras),
        "stops_early": train.early_stopping.condition if train.early_stopping is not None else None,
        "result": f"the weights with the best {experiment.checkpoint.best}" if experiment.checkpoint.best else None,
        "tracking": without_credentials(tracking.uri),
        "tracking_from": describe_origin(tracking.uri, is_set="uri" in tracking.model_fields_set),
        "registers": f"the trained model as a version of {registered.name}{alias}" if registered is not None else None,
        "trials": [_describe_trial(trial, plan.main) for trial in plan.measured],
        "notes": [*plan.notes, *sizes.notes],
    }


def _describe_optimizers(experiment: Experiment) -> Iterator[str]:
    """Describe each optimizer, with the parameters that several train, and its parameter groups."""
    for name, own in (experiment.by_optimizer or {"": experiment}).items():
        if name:
            one = experiment.optimizers[name]
            schedule = f", {own.scheduler.target}" if own.scheduler is not None else ""
            every = f", every {one.every} steps" if one.every not in (None, 1) else ""
            yield f"{name}: {one.target} of {', '.join(one.patterns)}{every}{schedule}"
        elif own.optimizer is not None:
            is_own = own.optimizer.target == LIGHTNING_OPTIMIZER
            yield "the one that the module defines" if is_own else own.optimizer.target
        yield from (f"group {group}" for group in (own.optimizer.groups if own.optimizer is not None else ()))


def _describe_trial(trial: Trial, main: Trial) -> dict[str, Any]:
    train, parallel, measure = trial.experiment.train, trial.experiment.parallel, trial.experiment.benchmark
    least, more = divmod(train.global_batch_size, trial.workers)
    if isinstance(trial, Training):
        purpose = f"trains {train.length}; measures throughput, step time and peak memory"
        if trial.train_only:
            purpose = f"trains {train.length}"
        if trial.is_quick:
            purpose = f"trains {trial.quick_steps} steps of {train.length}, evaluates, and saves a checkpoint"
    elif isinstance(main, Training) and trial in main.compared_with:
        purpose = (
            f"is measured in turn with the training, at most {measure.rounds} rounds in about "
            f"{measure.time_budget_s:g} s; rank 0 holds one more copy of the model meanwhile"
        )
    else:
        steps = f"{measure.windows} windows of {measure.steps} steps"
        purpose = f"measures throughput in {steps} after {counted(measure.warmup_steps, 'warm-up step')}"
    return {
        **{name: getattr(trial, name) for name in _OF_TRIAL},
        "elastic": f"{parallel.least_workers} to {parallel.workers} workers" if trial.is_elastic else None,
        "gpus_per_worker": trial.devices_per_worker or None,
        "threads_per_worker": trial.cpus_per_worker,
        "samples_per_worker": f"{least} or {least + 1}" if more else least,
        "max_steps": getattr(trial, "max_steps", None),
        "purpose": purpose,
    }

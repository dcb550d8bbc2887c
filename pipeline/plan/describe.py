"""Description of a plan for ``--dry-run``: one record, printed as YAML or JSON."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml

from pipeline.experiment.schema import LIGHTNING_OPTIMIZER, Experiment
from pipeline.experiment.uris import describe_origin, without_credentials
from pipeline.plan.plan import Plan
from pipeline.protocol.trial import Training, Trial
from pipeline.wording import counted

_OF_TRIAL = ("name", "role", "title", "strategy", "launcher", "workers", "device", "cpus_per_worker")


class DataSizes(NamedTuple):
    """Numbers of samples, and of steps in an epoch."""

    train_samples: int | None
    """None for a training set without a length, of which ``train.steps`` is one epoch."""
    validation_samples: int
    steps_per_epoch: int
    test_samples: int = 0
    epoch_samples: int | None = None
    """Samples of an epoch; None: as many as the training set has."""
    notes: tuple[str, ...] = ()
    """Promises that the data can't keep, one sentence each."""


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

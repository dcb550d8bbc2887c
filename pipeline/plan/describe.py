"""Description of a plan for ``--dry-run``, in words and as JSON."""

import json
from collections.abc import Iterator
from typing import NamedTuple

from pipeline.experiment.schema import LIGHTNING_OPTIMIZER, Experiment, RegisteredModel, Tracking
from pipeline.experiment.uris import describe_origin, without_credentials
from pipeline.plan.plan import Plan
from pipeline.protocol.trial import Training, Trial
from pipeline.wording import counted


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
    """Describe a plan in lines."""
    train = plan.experiment.train
    batches = f"{train.global_batch_size} samples each{_by_worker(plan)}, {train.precision}"
    data = f"{sizes.train_samples} training samples" if sizes.train_samples else "a training set without a length"
    data += f", {sizes.validation_samples} validation samples"
    data += f", {sizes.test_samples} test samples" if sizes.test_samples else ""
    whole = train.length if train.steps else f"{train.steps_of(sizes.steps_per_epoch)} in {train.length}"
    per_epoch = f"{sizes.steps_per_epoch} per epoch, {whole}" if sizes.train_samples else train.length
    steps = f"{per_epoch}, {batches}"
    sampler, tracking = plan.experiment.sampler, plan.experiment.tracking
    drawn = sizes.epoch_samples
    count = f", {drawn} samples in an epoch" if drawn not in (None, sizes.train_samples) else ""
    lines = [
        f"experiment   {plan.experiment.name}, seed {plan.experiment.seed}",
        f"machine      {plan.resources.summary}",
        f"data         {data}",
        *([f"sampler      by {sampler.target}{count}"] if sampler is not None else []),
        f"steps        {steps}",
        *_describe_module(plan.experiment),
        *([f"training     {', '.join(train.extras)}"] if train.extras else []),
        *_describe_optimizers(plan.experiment),
        *([f"stops early  {train.early_stopping.condition}"] if train.early_stopping is not None else []),
        *([f"result       the weights with the best {best}"] if (best := plan.experiment.checkpoint.best) else []),
        f"tracking     {without_credentials(tracking.uri)} ({_tracking_origin(tracking)})",
        *([f"registers    {_registered(to)}"] if (to := plan.experiment.tracking.register_model) is not None else []),
        "",
        "training run and measurements, in this order:",
    ]
    lines += [f"  {line}" for trial in plan.trials for line in _describe_trial(trial)]
    if isinstance(plan.main, Training) and plan.main.compared_with:
        lines += [f"  {line}" for line in _describe_turns(plan.main)]
    lines += [f"note: {note}" for note in (*plan.notes, *sizes.notes)]
    return "\n".join(lines)


def _describe_module(experiment: Experiment) -> Iterator[str]:
    """Describe a LightningModule, which stands for model, loss and, unless the file has one, optimizer."""
    if experiment.is_lightning:
        has_optimizer = experiment.optimizer is not None and experiment.optimizer.target == LIGHTNING_OPTIMIZER
        yield f"module       {experiment.model.target}{', with the optimizer that it defines' if has_optimizer else ''}"


def _describe_optimizers(experiment: Experiment) -> Iterator[str]:
    """Describe the parameter groups, and which parameters each of several optimizers trains."""
    for name, own in (experiment.by_optimizer or {"": experiment}).items():
        if name:
            one = experiment.optimizers[name]
            schedule = f", {own.scheduler.target}" if own.scheduler is not None else ""
            every = f", every {one.every} steps" if one.every not in (None, 1) else ""
            yield f"optimizer    {name}: {one.target} of {', '.join(one.patterns)}{every}{schedule}"
        yield from (f"group        {group}" for group in (own.optimizer.groups if own.optimizer is not None else ()))


def _tracking_origin(tracking: Tracking) -> str:
    return describe_origin(tracking.uri, is_set="uri" in tracking.model_fields_set)


def _registered(model: RegisteredModel) -> str:
    alias = f" with alias {model.alias}" if model.alias else ""
    return f"the trained model as a version of {model.name}{alias}"


def record(plan: Plan, sizes: DataSizes) -> str:
    """Describe a plan as JSON."""
    fields = {"name", "role", "title", "strategy", "launcher", "workers", "device", "cpus_per_worker", "max_steps"}
    return json.dumps(
        {
            "experiment": plan.experiment.name,
            "seed": plan.experiment.seed,
            "machine": plan.resources.summary,
            **sizes._asdict(),
            "sampler": f"by {sampler.target}" if (sampler := plan.experiment.sampler) is not None else None,
            "epochs": plan.experiment.train.epochs,
            "steps": plan.experiment.train.steps,
            "global_batch_size": plan.experiment.train.global_batch_size,
            "batch_size_per_worker": plan.experiment.train.batch_size_per_worker,
            "tracking": without_credentials(plan.experiment.tracking.uri),
            "tracking_from": _tracking_origin(plan.experiment.tracking),
            "trials": [{"max_steps": None} | trial.model_dump(mode="json", include=fields) for trial in plan.measured],
            "notes": [*plan.notes, *sizes.notes],
        },
        indent=2,
    )


def _by_worker(plan: Plan) -> str:
    """Return the division of the global batch if the file gives it by worker."""
    share, parallel = plan.experiment.train.batch_size_per_worker, plan.experiment.parallel
    most = "at most " if parallel.is_elastic else ""
    return f" ({share} for each of {most}{counted(parallel.workers, 'worker')})" if share is not None else ""


def _describe_turns(main: Training) -> list[str]:
    """Describe the trials that the training is compared with, and what measuring them takes."""
    measure, names = main.experiment.benchmark, [f"{trial.role} ({trial.title})" for trial in main.compared_with]
    memory = "a second copy" if len(names) == 1 else f"{len(names)} more copies"
    return [
        f"then      {', '.join(names)}",
        f"          alternating with the training run, at most {measure.rounds} rounds in about "
        f"{measure.time_budget_s:g} s",
        f"          rank 0 holds {memory} of the model meanwhile",
    ]


def _describe_trial(trial: Trial) -> list[str]:
    train = trial.experiment.train
    shares = sorted({train.global_batch_size // trial.workers, -(-train.global_batch_size // trial.workers)})
    share = " or ".join(map(str, shares))
    accumulated = f" in {train.gradient_accumulation} micro-batches" if train.gradient_accumulation > 1 else ""
    device = f"{trial.devices_per_worker} GPU each, " if trial.device == "cuda" else ""
    threads = counted(trial.cpus_per_worker, "CPU thread")
    workers = counted(trial.workers, "worker")
    parallel = trial.experiment.parallel
    if trial.is_elastic:
        workers += f" now ({parallel.least_workers} to {parallel.workers})"
    return [
        f"{trial.role:<9} {trial.strategy} with {trial.launcher}: {workers}, {device}{threads} each",
        f"          per-worker batch {share}{accumulated}",
        f"          {trial.purpose}",
    ]

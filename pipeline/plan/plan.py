"""Plan of a command, made from experiment and resources by a pure function."""

import os
from collections.abc import Iterator
from itertools import chain
from typing import Literal

from pipeline import registry
from pipeline.experiment.schema import Configuration, Experiment, Parallel
from pipeline.experiment.values import Frozen
from pipeline.plan.layout import Planner
from pipeline.plan.outer_launcher import find_ignored_ranks
from pipeline.plan.resources import Resources
from pipeline.plan.scheduler_units import scheduler_units
from pipeline.protocol.trial import QUICK_STEPS, Baseline, Reference, Training, Trial


class Plan(Frozen):
    """Trials of a command, in order."""

    command: Literal["run", "benchmark", "sweep", "study", "evaluate"] = "run"
    experiment: Experiment
    resources: Resources
    trials: tuple[Trial, ...]
    """Trials that are launched one after the other."""
    notes: tuple[str, ...] = ()
    """Notes to the user, shown before the first trial starts."""

    @property
    def main(self) -> Trial:
        """The training; the first trial if the command only measures."""
        return next((trial for trial in self.trials if isinstance(trial, Training)), self.trials[0])

    @property
    def measured(self) -> tuple[Trial, ...]:
        """All trials that have a result: those that are launched, and those that the training is compared with."""
        beside = (trial.compared_with for trial in self.trials if isinstance(trial, Training))
        return (*self.trials, *chain.from_iterable(beside))


TRAIN_ONLY = "--train-only: no speedup, no step-time breakdown, no recommendations"
"""Note on a run that only trains."""
QUICK = f"--quick: {QUICK_STEPS} steps, one evaluation and one checkpoint. The model is not trained"
"""Note on a run that only tries whether the experiment works."""


_MOST_OF_DP = 4
"""GPUs beyond which a plan with dp proposes ddp."""


def restriction(trial: Trial) -> str:
    """Return the note on a training that measures nothing; empty for other trials."""
    if not isinstance(trial, Training) or not trial.train_only:
        return ""
    return QUICK if trial.is_quick else TRAIN_ONLY


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

    With ``quick`` the training ends after two steps, and nothing is measured either.

    The baseline gets the same cores for its one worker that each worker of the main trial has, so that N workers have
    N times the cores. On CPU a reference shows what one process with all those cores does. Both are measured in turn
    with the main trial by its rank 0; a baseline that can't run in one process is measured before. An elastic main
    trial has as many workers here as fit now; how many it begins with is decided when it is launched.

    Raises:
        ExperimentError: strategy, launcher and workers don't go together.
        ResourceError: there are too few cores or GPUs.
    """
    planner = Planner(experiment, resources, allowed)
    parallel = experiment.parallel
    own = Configuration(strategy=parallel.strategy, workers=planner.workers, options=parallel.options)
    train_only = train_only or quick
    main = planner.trial(Training, own, train_only=train_only, is_quick=quick)
    with_baseline = with_baseline and not train_only
    others = list(_compared(main, planner=planner, experiment=experiment, resources=resources)) if with_baseline else []
    measure = experiment.benchmark
    first_steps = {"max_steps": measure.warmup_steps + measure.steps}  # for their losses; slots have their own steps
    beside = tuple(trial.model_copy(update=first_steps) for trial in others if _runs_beside(trial, main=main))
    return Plan(
        experiment=experiment,
        resources=resources,
        trials=(
            *(trial for trial in others if not _runs_beside(trial, main=main)),
            main.model_copy(update={"compared_with": beside}),
        ),
        notes=(
            *resources.notes,
            *planner.describe_room(main),
            *_notes(main, has_baseline=any(isinstance(each, Baseline) for each in others), wanted=with_baseline),
        ),
    )


def _compared(
    main: Training, *, planner: Planner, experiment: Experiment, resources: Resources
) -> Iterator[Baseline | Reference]:
    """Yield the baseline, unless it is the training itself, and on CPU one process with all cores."""
    baseline = planner.trial(Baseline, experiment.benchmark.baseline, key="benchmark.baseline")
    if not same_work(baseline, main):
        yield baseline
    if main.device == "cpu" and main.workers > 1 and resources.is_one_node and not resources.is_divided:
        yield planner.reference()


def _runs_beside(trial: Trial, *, main: Trial) -> bool:
    """Return True if rank 0 of the main trial can run a trial by itself, with its devices."""
    if trial.devices_per_worker > main.devices_per_worker:  # such as dp beside ddp, whose ranks have a GPU each
        return False
    strategy = registry.load("strategies", trial.strategy).Strategy
    return trial.workers == 1 and not strategy.needs_process_group


def same_work(one: Trial, other: Trial) -> bool:
    """Return True if two trials of an experiment distribute the work in the same way."""
    return (one.strategy, one.workers, one.options) == (other.strategy, other.workers, other.options)


def _notes(main: Training, *, has_baseline: bool, wanted: bool) -> Iterator[str]:
    if note := restriction(main):
        yield note
    if main.device == "cpu" and main.experiment.parallel.device == "auto":
        yield "No GPU found. Training on the CPU."
    if main.strategy == "dp" and main.replicas < 2:
        yield "DataParallel (dp) needs at least 2 GPUs. With fewer, it runs a single replica and gives no speedup."
    if main.strategy == "dp" and main.replicas > _MOST_OF_DP:
        yield (
            f"DataParallel (dp) on {main.replicas} GPUs: GPU 0 copies the model and gathers all outputs in each step, "
            f"which limits the others. Use strategy: ddp and workers: {main.replicas}."
        )
    if main.strategy == "fsdp" and main.workers < 2:
        yield "fsdp with one worker shards nothing and saves no memory."
    if main.experiment.train.batch_size_per_worker is not None:
        size = main.experiment.train.global_batch_size
        yield (
            f"The global batch size is {size} (train.batch_size_per_worker x parallel.workers). The baseline uses the "
            "same size. The size stays the same if the run is resumed with another number of workers."
        )
    if main.experiment.train.ema is not None:
        yield "train.ema: the averaged weights are evaluated and logged as the model."
    yield from scheduler_units(main.experiment)
    yield from _find_ignored_variables(main.experiment.parallel)
    yield from _find_lost_results(main.experiment)
    if main.experiment.sweep is not None:
        yield "This run uses the values of the file. To search the values of its sweep section, use pipeline sweep."
    if wanted and not has_baseline:
        yield f"The training run is the baseline ({main.title}), so no speedup is measured."


def _find_ignored_variables(parallel: Parallel) -> Iterator[str]:
    """Name variables that a platform or an earlier session has set, and that this run does not use."""
    if ranks := find_ignored_ranks():
        yield (
            f"{ranks}: ignored, because torchrun or srun did not start this process. It trains alone, without "
            "the other processes of the platform. To train in all of them together, start pipeline with torchrun."
        )
    if parallel.launcher != "ray" and (address := os.environ.get("RAY_ADDRESS")):
        yield (
            f"RAY_ADDRESS={address}: ignored, because parallel.launcher is {parallel.launcher}. To train on this "
            "cluster, set parallel.launcher=ray."
        )


def _find_lost_results(experiment: Experiment) -> Iterator[str]:
    """Name what a Ray job writes to its working directory."""
    if "working_dir" not in os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", ""):
        return
    places = {
        "tracking.directory": experiment.tracking.directory,
        "tracking.uri": experiment.tracking.uri.removeprefix("sqlite:///"),
        "checkpoint.directory": experiment.checkpoint.directory or "/",
    }
    for key, place in places.items():
        if "://" not in place and not place.startswith(("/", "~")):
            yield f"{key} is in the working directory of this Ray job, which Ray deletes. Set a lasting place."

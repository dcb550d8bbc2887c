"""Plan of a command: the trials that an experiment needs on a machine, found by pure functions of both."""

import os
from collections.abc import Iterator
from itertools import chain
from typing import Literal, TypeVar

from pipeline import registry
from pipeline.errors import ExperimentError, ResourceError
from pipeline.experiment import references
from pipeline.experiment.schema import Configuration, Experiment
from pipeline.experiment.values import Frozen
from pipeline.plan.outer_launcher import find_ignored_ranks
from pipeline.plan.resources import Resources
from pipeline.protocol.trial import QUICK_STEPS, Baseline, Reference, Training, Trial
from pipeline.wording import counted

TRAIN_ONLY = "--train-only: no speedup, no step-time breakdown, no recommendations"
"""Note on a run that only trains."""
QUICK = f"--quick: {QUICK_STEPS} steps, one evaluation and one checkpoint. The model is not trained"
"""Note on a run that only tries whether the experiment works."""
_LENGTHS = ("step_size", "milestones", "T_max", "T_0", "total_iters")
"""Arguments of torch's schedulers that count their advances."""
_FACTOR = 0.99
"""Factor of a rate after each step that leaves less than a thousandth of it after 700 steps."""

T = TypeVar("T", bound=Trial)


class Plan(Frozen):
    """Trials of a command, in order."""

    command: Literal["run", "benchmark", "compare", "sweep", "evaluate"] = "run"
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
        workers_per_node = -(-self.workers // resources.nodes)  # a worker's cores are on one node
        self.share = max(1, resources.cpus // resources.nodes // workers_per_node)
        if resources.placed:
            self.share = max(1, min(node.cpus_per_worker for node in resources.placed))
        self.cpus = parallel.cpus_per_worker or min(self.share, resources.threads or self.share)
        self.room = min(
            resources.cpus // self.cpus,
            len(resources.gpus) if self.device == "cuda" else self.workers,
            resources.nodes if parallel.placement == "strict_spread" else self.workers,
        )
        if resources.placed:
            self.room = sum(node.workers for node in resources.placed)
        if workers is None and parallel.is_elastic:
            self.workers = max(parallel.least_workers, min(self.workers, self.room))

    def trial(self, kind: type[T], entry: Configuration, *, key: str = "parallel", **own: object) -> T:
        """Return the trial of an entry, which the file has at ``key``, with its role's ``own`` fields."""
        parallel = self._experiment.parallel
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
        self._check_contradictions(trial, key=key)
        self._check_room(trial)
        return trial

    def reference(self) -> Reference:
        """Return the trial of one process with all the cores; for the errors see `trial`."""
        return self.trial(Reference, Configuration(strategy="single"), cpus_per_worker=self.cpus * self.workers)

    def _check_contradictions(self, trial: Trial, *, key: str) -> None:
        """Refuse what can't be combined on this device; what never can is in `experiment.consistency`."""
        train = self._experiment.train
        if train.compile is not None and self.device == "cpu":
            if train.compile.mode == "reduce-overhead":
                raise ExperimentError.of(
                    "train.compile.mode",
                    "reduce-overhead uses CUDA graphs, which a CPU does not have. Use mode: default or max-autotune.",
                )
            if not self._resources.has_compiler:
                raise ResourceError(
                    "train.compile: no C++ compiler found, and compiling for the CPU needs one. Install g++, or set "
                    "the environment variable CXX to your compiler, or set train.compile to false."
                )
        elif train.compile is not None and train.compile.has_cuda_graphs and train.gradient_accumulation > 1:
            # The second replay overwrites what autograd still holds.
            raise ExperimentError.of(
                "train.compile.mode",
                f"{train.compile.mode} replays CUDA graphs, which torch does not support with "
                f"train.gradient_accumulation: {train.gradient_accumulation}. Use mode: max-autotune-no-cudagraphs or "
                "default.",
            )
        if trial.strategy == "dp" and trial.replicas > 1 and train.compile is not None:
            raise ExperimentError.of(
                f"{key}.strategy",
                "dp copies the model in each step, which torch.compile does not support. Use ddp, or compile: false.",
            )
        most = self._experiment.parallel.workers if trial.is_elastic else trial.workers
        is_offloaded = trial.strategy == "fsdp" and trial.options.get("cpu_offload")
        if is_offloaded and most > 1 and train.precision == "fp16":
            raise ExperimentError.of(
                f"{key}.options.cpu_offload",
                f"cpu_offload cannot be combined with train.precision: fp16 and {most} workers. NCCL would have to "
                "compare overflows of gradients in host memory. Use precision: bf16, or remove cpu_offload.",
            )

    def _check_room(self, trial: Trial) -> None:
        """Refuse a trial that doesn't fit, rather than run it with fewer workers."""
        there, parallel = self._resources, self._experiment.parallel
        workers, cores = counted(trial.workers, "worker"), counted(trial.cpus_per_worker, "core")
        needed = trial.cpus_per_worker * trial.workers
        if trial.workers > 1 and trial.workers == sum(node.workers for node in there.placed):
            for node in there.placed:
                if trial.cpus_per_worker * node.workers > node.cpus:
                    raise ResourceError(
                        f"parallel.workers: {counted(node.workers, 'worker')} with {cores} each were started on "
                        f"{node.node}, where they may use {counted(node.cpus, 'core')}. Start fewer workers there, or "
                        "give them more cores."
                    )
        if there.is_autoscaled:  # nodes may be added
            if parallel.device == "auto" and trial.device == "cpu" and needed > there.cpus:
                raise ResourceError(
                    f"parallel.device: auto can't be resolved. {workers} need {counted(needed, 'core')}, and "
                    f"{there.node} has {there.summary}. Its autoscaler can add nodes, but whether these have GPUs is "
                    "unknown. Set device to cpu or cuda."
                )
            return
        if parallel.placement == "strict_spread" and trial.workers > there.nodes:
            raise ResourceError(
                f"parallel.placement: strict_spread needs a node for each of {workers}. "
                f"{there.node} has {counted(there.nodes, 'node')} for them. Use fewer workers, or spread."
            )
        if (gpus := trial.devices_per_worker * trial.workers) > len(there.gpus):
            has = f"need {gpus} GPUs. {there.node} has {there.summary}."
            if trial.devices_per_worker == 1:
                message = f"parallel.workers: {trial.workers} workers {has} Use fewer workers, or device: cpu."
            else:
                each = f"{workers} with {trial.devices_per_worker} GPUs each"
                message = f"parallel.gpus_per_worker: {each} {has} Use fewer GPUs, or device: cpu."
            raise ResourceError(message)
        if needed > there.cpus:
            fit = there.cpus // trial.cpus_per_worker
            fewer = f"Use at most {counted(fit, 'worker')}."
            remedy = fewer if fit else f"Set parallel.cpus_per_worker to {there.cpus}."
            raise ResourceError(
                f"parallel.workers: {workers} with {cores} each need {needed} cores. {there.node} has {there.summary}. "
                f"{remedy}"
            )


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
    notes = [*_find_notes(main), *_find_notes_on_resources(planner, main, resources)]
    if with_baseline and not train_only and not any(isinstance(trial, Baseline) for trial in others):
        notes.append(f"The training run is the baseline ({main.title}), so no speedup is measured.")
    beside, before = [], []
    measure = experiment.benchmark
    first_steps = {"max_steps": measure.warmup_steps + measure.steps}  # for their losses; slots have their own steps
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
    return QUICK if trial.is_quick else TRAIN_ONLY


def _find_notes(main: Training) -> Iterator[str]:
    """Yield what the user should know of the experiment, whatever the machine."""
    train = main.experiment.train
    if note := restriction(main):
        yield note
    if main.device == "cpu" and main.experiment.parallel.device == "auto":
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


def _find_notes_on_resources(planner: Planner, main: Training, resources: Resources) -> Iterator[str]:
    """Yield what the user should know of the machine, its environment variables, and where results go."""
    yield from resources.notes
    parallel, most = main.experiment.parallel, main.experiment.parallel.workers
    if resources.is_autoscaled and planner.room < main.workers:
        yield f"Room for {planner.room} of {most} workers is free. The cluster's autoscaler may add nodes."
    elif main.workers < most:
        yield f"Room for {main.workers} of {most} workers is free."
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
        yield (
            f"RAY_ADDRESS={address}: ignored, because parallel.launcher is {parallel.launcher}. To train on this "
            "cluster, set parallel.launcher=ray."
        )
    if "working_dir" in os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", ""):
        places = {
            "tracking.directory": main.experiment.tracking.directory,
            "tracking.uri": main.experiment.tracking.uri.removeprefix("sqlite:///"),
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
    declared = {"scheduler": experiment.scheduler}
    declared |= {f"schedulers.{name}": one for name, one in experiment.schedulers.items()}
    for key, scheduler in declared.items():
        given, said = (scheduler.arguments if scheduler is not None else {}), ""
        for name in _LENGTHS:
            value = given.get(name)
            counts = value if isinstance(value, list | tuple) else [value]
            if counts and all(isinstance(count, int) and count <= epochs for count in counts):
                said = f"{name} is {value}. This counts steps, because the scheduler advances after each step"
                break
        gamma = given.get("gamma")
        is_exponential = scheduler is not None and scheduler.target.endswith(".ExponentialLR")
        if not said and is_exponential and isinstance(gamma, float) and gamma <= _FACTOR:
            said = f"gamma is {gamma:g}. The learning rate is multiplied by gamma after each step"
        if said:
            yield f"{key}.{said}. To count epochs, set train.scheduler_interval to epoch"

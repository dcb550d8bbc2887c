"""Layout of an experiment's trials: workers, devices, cores and threads."""

from collections.abc import Iterator
from typing import Any, Literal, TypeVar

from pipeline import registry
from pipeline.errors import ExperimentError, ResourceError
from pipeline.experiment.benchmark_section import Configuration
from pipeline.experiment.schema import Experiment
from pipeline.plan.resources import Resources
from pipeline.protocol.trial import Reference, Trial
from pipeline.wording import counted

T = TypeVar("T", bound=Trial)


class Planner:
    """Planner of one experiment's trials, which all have the same device and the same cores for each worker."""

    def __init__(
        self, experiment: Experiment, resources: Resources, allowed: tuple[str, ...], *, workers: int | None = None
    ) -> None:
        """Divide each node's cores among ``workers``, by default those that the experiment asks for.

        Raises:
            ResourceError: there is no such device.
        """
        self._experiment = experiment
        self._resources = resources
        self._allowed = allowed
        self.device = _device(experiment, resources)
        parallel = experiment.parallel
        self.workers = workers or parallel.workers
        workers_per_node = -(-self.workers // resources.nodes)  # a worker's cores are on one node
        cpus_per_node = resources.cpus // resources.nodes
        share = cpus_per_node // workers_per_node
        if resources.placed:
            share = min(node.cpus_per_worker for node in resources.placed)
        self._cpus = parallel.cpus_per_worker or max(1, share)
        if workers is None and parallel.is_elastic:
            self.workers = max(parallel.least_workers, min(self.workers, self._room()))

    def trial(self, kind: type[T], entry: Configuration, *, key: str = "parallel", **own: Any) -> T:
        """Return the trial of an entry, which stands at ``key`` of the experiment file, with its role's ``own`` fields.

        Raises:
            ExperimentError: strategy, launcher and workers don't go together.
            ResourceError: there are too few cores or GPUs.
        """
        strategy = registry.load("strategies", entry.strategy).Strategy
        default = self._experiment.parallel.workers if strategy.processes == "many" else 1
        workers = entry.workers or default
        launcher = self._experiment.parallel.launcher
        if workers > 1 and not registry.load("launchers", launcher).Launcher.many_processes:
            raise ExperimentError.of(
                f"{key}.workers",
                f"is {workers}, but {launcher} runs one process. Set parallel.launcher to torchrun or ray.",
            )
        refusal = strategy.refuse(strategy.Options.model_validate(entry.options), device=self.device)
        if refusal is not None:
            raise ExperimentError.of(f"{key}.options", refusal)
        self._check_compilation()
        gpus = self._gpus_per_worker(strategy.devices == "all", entry.strategy, key=key)
        layout = {
            "name": kind.model_fields["role"].default,
            "experiment": self._experiment,
            "strategy": entry.strategy,
            "options": entry.options,
            "launcher": launcher,
            "workers": workers,
            "devices_per_worker": gpus if self.device == "cuda" else 0,
            "device": self.device,
            "cpus_per_worker": self._cpus,
            "allowed": self._allowed,
        }
        trial = kind(**layout | own)
        _check_room(trial, self._resources)
        _check_replicas(trial, key=key)
        _check_offload(trial, key=key)
        return trial

    def reference(self) -> Reference:
        """Return the trial of one process with all the cores; for the errors see `trial`."""
        return self.trial(Reference, Configuration(strategy="single"), cpus_per_worker=self._cpus * self.workers)

    def describe_room(self, trial: Trial) -> Iterator[str]:
        """Yield a note if there is no room now for all workers of the experiment's trial."""
        most = self._experiment.parallel.workers
        if self._resources.is_autoscaled and (room := self._room()) < trial.workers:
            yield f"Room for {room} of {most} workers is free. The run requests nodes from the cluster's autoscaler."
        elif trial.workers < most:
            yield f"Room for {trial.workers} of {most} workers is free."

    def _check_compilation(self) -> None:
        how = self._experiment.train.compile
        if how is None:
            return
        if self.device != "cpu":
            accumulation = self._experiment.train.gradient_accumulation
            if how.has_cuda_graphs and accumulation > 1:  # the second replay overwrites what autograd still holds
                raise ExperimentError.of(
                    "train.compile.mode",
                    f"{how.mode} replays CUDA graphs, which torch does not support with train.gradient_accumulation: "
                    f"{accumulation}. Use mode: max-autotune-no-cudagraphs or default.",
                )
            return
        if how.mode == "reduce-overhead":
            message = "reduce-overhead uses CUDA graphs, which a CPU does not have. Use mode: default or max-autotune."
            raise ExperimentError.of("train.compile.mode", message)
        if not self._resources.has_compiler:
            raise ResourceError(
                "train.compile: no C++ compiler found, and compiling for the CPU needs one. Install g++, or set the "
                "environment variable CXX to your compiler, or set train.compile to false."
            )

    def _gpus_per_worker(self, uses_several: bool, strategy: str, *, key: str) -> int:
        wanted = self._experiment.parallel.gpus_per_worker
        if uses_several:
            return wanted or max(1, len(self._resources.gpus) // self._resources.nodes)
        if key == "parallel" and (wanted or 1) > 1:
            raise ExperimentError.of(
                "parallel.gpus_per_worker",
                f"is {wanted}, but {strategy} uses one GPU per worker. Set parallel.workers instead.",
            )
        return 1

    def _room(self) -> int:
        """Return how many workers fit."""
        there = self._resources
        if there.placed:
            return sum(node.workers for node in there.placed)
        limits = [there.cpus // self._cpus]
        limits += [len(there.gpus)] if self.device == "cuda" else []
        limits += [there.nodes] if self._experiment.parallel.placement == "strict_spread" else []
        return min(limits)


def _device(experiment: Experiment, resources: Resources) -> Literal["cpu", "cuda"]:
    wanted = experiment.parallel.device
    if wanted == "cuda" and not resources.gpus and not resources.is_autoscaled:
        raise ResourceError(
            f"parallel.device: cuda needs a GPU. {resources.node} has {resources.summary}. Use auto or cpu."
        )
    if wanted == "auto":
        return "cuda" if resources.gpus else "cpu"
    return wanted


def _check_replicas(trial: Trial, *, key: str) -> None:
    """Reject what dp can't compute on several GPUs; on one, or on CPU, the model itself is trained."""
    if trial.strategy == "dp" and trial.replicas > 1 and trial.experiment.train.compile is not None:
        message = "dp copies the model in each step, which torch.compile does not support. Use ddp, or compile: false."
        raise ExperimentError.of(f"{key}.strategy", message)


def _check_offload(trial: Trial, *, key: str) -> None:
    """Reject fp16 with offloaded shards of several workers, which torch can't check for overflow over NCCL."""
    most = trial.experiment.parallel.workers if trial.is_elastic else trial.workers
    is_offloaded = trial.strategy == "fsdp" and trial.options.get("cpu_offload")
    if is_offloaded and most > 1 and trial.experiment.train.precision == "fp16":
        raise ExperimentError.of(
            f"{key}.options.cpu_offload",
            f"cpu_offload cannot be combined with train.precision: fp16 and {most} workers. NCCL would have to compare "
            "overflows of gradients in host memory. Use precision: bf16, or remove cpu_offload.",
        )


def _check_room(trial: Trial, resources: Resources) -> None:
    """Refuse a trial that doesn't fit, rather than run it with fewer workers."""
    if trial.workers > 1:
        _check_placed(trial, resources)
    if resources.is_autoscaled:
        _check_device_of_new_nodes(trial, resources)
        return
    if trial.experiment.parallel.placement == "strict_spread" and trial.workers > resources.nodes:
        raise ResourceError(
            f"parallel.placement: strict_spread needs a node for each of {counted(trial.workers, 'worker')}. "
            f"{resources.node} has {counted(resources.nodes, 'node')} for them. Use fewer workers, or spread."
        )
    if trial.replicas > len(resources.gpus) and trial.devices_per_worker > 1:
        raise ResourceError(
            f"parallel.gpus_per_worker: {counted(trial.workers, 'worker')} with {trial.devices_per_worker} GPUs each "
            f"need {trial.replicas} GPUs. {resources.node} has {resources.summary}. Use fewer GPUs, or device: cpu."
        )
    if trial.devices_per_worker * trial.workers > len(resources.gpus):
        raise ResourceError(
            f"parallel.workers: {trial.workers} workers need {trial.workers} GPUs. {resources.node} has "
            f"{resources.summary}. Use fewer workers, or device: cpu."
        )
    if (needed := trial.cpus_per_worker * trial.workers) > resources.cpus:
        fit = resources.cpus // trial.cpus_per_worker
        fewer = f"Use at most {counted(fit, 'worker')}."
        remedy = fewer if fit else f"Set parallel.cpus_per_worker to {resources.cpus}."
        raise ResourceError(
            f"parallel.workers: {counted(trial.workers, 'worker')} with {counted(trial.cpus_per_worker, 'core')} "
            f"each need {needed} cores. {resources.node} has {resources.summary}. {remedy}"
        )


def _check_device_of_new_nodes(trial: Trial, resources: Resources) -> None:
    """Reject ``device: auto`` where nodes have to be added: nothing shows whether these have GPUs."""
    needed = trial.cpus_per_worker * trial.workers
    if trial.experiment.parallel.device == "auto" and trial.device == "cpu" and needed > resources.cpus:
        raise ResourceError(
            f"parallel.device: auto can't be resolved. {counted(trial.workers, 'worker')} need "
            f"{counted(needed, 'core')}, and {resources.node} has {resources.summary}. Its autoscaler can add nodes, "
            "but whether these have GPUs is unknown. Set device to cpu or cuda."
        )


def _check_placed(trial: Trial, resources: Resources) -> None:
    """Refuse workers that an outer launcher has placed on nodes with too few cores for them."""
    for node in resources.placed if trial.workers == sum(node.workers for node in resources.placed) else ():
        if trial.cpus_per_worker * node.workers > node.cpus:
            raise ResourceError(
                f"parallel.workers: {counted(node.workers, 'worker')} with {counted(trial.cpus_per_worker, 'core')} "
                f"each were started on {node.node}, where they may use {counted(node.cpus, 'core')}. Start fewer "
                "workers there, or give them more cores."
            )

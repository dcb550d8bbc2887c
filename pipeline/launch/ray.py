"""Launcher for workers under Ray Train, on this machine or across the nodes of a cluster.

It starts a local Ray unless ``parallel.address`` or RAY_ADDRESS names a cluster. All trials of a run share it. The code
for Ray itself is in `pipeline.launch.cluster`.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Self

import ray
import ray.train
from ray.exceptions import RayActorError, RayError
from ray.train import ControllerError, FailureConfig, RunConfig, ScalingConfig, TrainingFailedError, WorkerGroupError
from ray.train.backend import Backend, BackendConfig

from pipeline.errors import ResourceError
from pipeline.experiment.schema import Experiment, Parallel
from pipeline.launch import base, cluster
from pipeline.launch.base import LOOPBACK
from pipeline.launch.node_facts import INSTALL_SAME_COMMIT, find_versions, interface_variables
from pipeline.plan import resources
from pipeline.plan.resources import Resources
from pipeline.protocol.channel import Address, ChannelOutbox, open_server
from pipeline.protocol.events import Outcome, Warned
from pipeline.protocol.trial import Baseline, Rank, Training, Trial, trial_from_json
from pipeline.system import begin_stage, environment, python_path
from pipeline.train.storage import address_of
from pipeline.wording import counted, first_line

_AFTER_OTHERS_S = 30.0
"""Seconds after ``parallel.timeout_s`` in which waiting ranks give up and Ray may notice a dead node."""
_LIMITS = {"max_failures", "controller_failure_limit", "max_preemption_failures"}
"""Limits on restarts by Ray Train: none, as the driver restarts workers itself. Not all releases have the last one."""


class Launcher(base.Launcher):
    """Runs each trial with Ray Train V2."""

    def __init__(self, session: base.Session) -> None:
        super().__init__(session)
        self._address = session.parallel.cluster
        self._code = cluster.code_for_nodes() if self._address is not None else {}
        self._running = 0  # workers

    @classmethod
    @contextmanager
    def preparing(cls, experiment: Experiment, *, verbose: bool = False) -> Iterator[None]:
        """Start a local Ray; the workers have Python's hashes from the experiment's seed."""
        seed = os.environ.get("PYTHONHASHSEED", str(experiment.seed % 2**32))
        with environment(PYTHONHASHSEED=seed), ExitStack() as end:
            if experiment.parallel.cluster is None:
                end.push(cluster.LocalRay(verbose=verbose))
            yield

    def __enter__(self) -> Self:
        """Connect to Ray. An existing cluster receives the code; a local Ray needs none."""
        begin_stage("starting Ray" if self._address is None else "connecting to Ray")
        verbose = self.session.verbose
        if self._address is None:
            self.held.enter_context(cluster.LocalRay.begun or cluster.LocalRay(verbose=verbose))
        else:
            self.held.enter_context(cluster.connected(self._address, verbose=verbose, runtime_env=self._code))
        return self

    @staticmethod
    def resources(parallel: Parallel) -> Resources:
        """Return the resources of this machine, or of all nodes of the cluster."""
        address = parallel.cluster
        return resources.detect() if address is None else cluster.find_resources(address, parallel)

    def capacity(self, trial: Trial) -> int:
        """Return the workers that fit now, running ones included; the least number where nodes can be added."""
        try:
            fit = cluster.count_room(trial, running=self._running)
            return max(fit, trial.experiment.parallel.least_workers) if cluster.has_autoscaler() else fit
        except RayError:  # the head doesn't answer: the workers end, too
            return self._running

    def launch(self, trial: Trial) -> Outcome:
        """Run the trial; see `pipeline.launch.base.Launcher`."""
        attempt = self.attempt(trial)
        if self._address is not None:
            may_come = cluster.has_autoscaler() or (isinstance(trial, Training) and trial.resume)
            cluster.await_room(trial, may_come=may_come, warn=partial(self._warn, trial=trial))
        host = LOOPBACK if self._address is None else ray.util.get_node_ip_address()
        parallel = trial.experiment.parallel
        timeouts = {  # the hang detector finds hanging ranks; Ray's is for ranks whose node is gone
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": f"{parallel.start_timeout_s:g}",
            "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": f"{parallel.timeout_s + _AFTER_OTHERS_S:g}",
        }
        with attempt.listening(host) as address, environment(**timeouts):
            self._running = trial.workers
            try:
                trainer = self._trainer(attempt.trial, address)
                error = cluster.outside_main_thread(trainer.fit, name="ray-train")
            finally:
                self._running = 0
        return attempt.outcome(_find_losses(error, trial, silent=attempt.silent))

    def _warn(self, message: str, trial: Trial) -> None:
        self.session.receive(Warned(trial=trial.name, message=message))

    def _trainer(self, trial: Trial, address: Address) -> Any:
        from ray.train.torch import TorchTrainer  # imports torch

        return TorchTrainer(
            work,
            train_loop_config={
                "trial": trial.model_dump_json(),
                "channel": str(address),
                "logs": None if self.session.verbose else str(self.session.log_folder(trial)),
                "cwd": str(Path.cwd()),
                "paths": cluster.import_paths(is_sent=bool(self._code)),
                "shared": self._shared_folders(trial),
                "versions": find_versions(),
            },
            torch_config=_Rendezvous(is_local=self._address is None),
            scaling_config=ScalingConfig(
                num_workers=trial.workers,
                use_gpu=trial.device == "cuda",
                resources_per_worker=cluster.per_worker(trial),
                placement_strategy=trial.experiment.parallel.placement.upper(),
            ),
            run_config=RunConfig(
                name=trial.name,
                storage_path=str(Path(trial.folder) / "ray"),
                failure_config=FailureConfig(**{own.name: 0 for own in fields(FailureConfig) if own.name in _LIMITS}),
            ),
        )

    def _shared_folders(self, trial: Trial) -> dict[str, str]:
        """Return the folders that all nodes must have, by the key that sets them; make the one for checkpoints."""
        shared = {"tracking.directory": trial.folder}
        own = trial.experiment.checkpoint
        if own.directory and "://" not in own.directory and own.keep and isinstance(trial, Training | Baseline):
            place = shared["checkpoint.directory"] = address_of(own.directory, run=self.session.folder)
            try:
                Path(place).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                what = f"this machine can't write checkpoints to {place}: {error.strerror or error}"
                raise ResourceError(f"{what}. Set checkpoint.directory to another folder.") from error
        return shared


@dataclass
class _Rendezvous(BackendConfig):  # type: ignore[misc]
    """Sends workers their interface and rank 0's address; Ray's own would import torch in its controller first."""

    is_local: bool
    backend: str = "made by the workers"  # asked for by TorchTrainer

    @property
    def backend_cls(self) -> type:
        """The class whose ``on_start`` Ray calls once all workers have started."""
        return _RendezvousBackend


class _RendezvousBackend(Backend):  # type: ignore[misc]
    share_cuda_visible_devices = True  # as in Ray's TorchConfig: NCCL connects GPUs of a node that see each other

    def on_start(self, worker_group: Any, backend_config: _Rendezvous) -> None:
        own = LOOPBACK if backend_config.is_local else ""
        address, port = worker_group.execute_single(0, _find_free_address, own)
        worker_group.execute(_set_rendezvous, address, port, own)


def _find_free_address(own: str) -> tuple[str, int]:
    address = own or ray.util.get_node_ip_address()
    with open_server(address) as probe:
        return address, int(probe.getsockname()[1])


def _set_rendezvous(address: str, port: int, own: str) -> None:
    """Set the address of rank 0 and the interface of gloo and NCCL: the environment's, or that of the node in Ray."""
    interface = interface_variables(own or ray.util.get_node_ip_address())
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port), **interface)


def work(config: dict[str, Any]) -> None:
    """Run one rank of a trial in the process that Ray Train gave it."""
    context = ray.train.get_context()
    rank = Rank(
        rank=context.get_world_rank(),
        local_rank=context.get_local_rank(),
        world_size=context.get_world_size(),
        local_world_size=context.get_local_world_size(),
        node=os.uname().nodename,
    )
    _check_node(rank.node, versions=config["versions"], shared=config["shared"])
    paths = [str(Path.cwd() / path) for path in config["paths"]]
    sys.path[:0] = [path for path in paths if path not in sys.path]
    os.environ["PYTHONPATH"] = python_path(*paths)
    if Path(config["cwd"]).is_dir():  # else the relative paths of the experiment begin where the code was sent
        os.chdir(config["cwd"])
    from pipeline import worker  # and torch with it

    if config["logs"] is not None:
        worker.redirect_output(Path(config["logs"]), rank)
    trial = trial_from_json(config["trial"])
    with ChannelOutbox(Address.parse(config["channel"]), rank=rank.rank, folder=Path(trial.folder)) as outbox:
        try:
            worker.run(trial, rank, outbox, end=partial(worker.end_process, outbox.close))
        except worker.WorkerFailed:
            worker.log_traceback()
            raise worker.WorkerFailed from None  # Ray writes the cause as well, with values of the environment


def _check_node(node: str, *, versions: Mapping[str, str | None], shared: Mapping[str, str]) -> None:
    """Compare this node with the driver's machine: versions, and folders that must be on shared storage."""
    here = find_versions()
    for package, version in versions.items():
        if version is not None and here[package] != version:
            has = f"it has {package} {here[package]}" if here[package] else f"it has no {package}"
            ours = package == "ddp-pipeline"
            remedy = f"On that node, {INSTALL_SAME_COMMIT if ours else f'pip install {package}=={version}'}"
            raise ResourceError(f"{node} can't run workers: {has}, and the driver has {version}. {remedy}")
    for key, place in shared.items():
        if not Path(place).is_dir():
            what = f"{place} of the driver's machine is not there. Workers on several nodes write to shared storage"
            address = ", or to an address such as s3://bucket/folder" if key == "checkpoint.directory" else ""
            raise ResourceError(
                f"{node} can't run workers: {what}. Set {key} to a folder that all nodes share{address}."
            )


def _find_losses(error: BaseException | None, trial: Trial, *, silent: Mapping[int, str]) -> Mapping[int, str]:
    """Return how workers ended, by rank; raise an error that is about no worker, or that a node lacks something."""
    if error is None:
        return {}
    if isinstance(error, WorkerGroupError):
        for failure in error.worker_failures.values():
            if isinstance(failure, ResourceError):  # others are reported to the driver by the worker
                raise failure
        return {rank: _describe_loss(failure) for rank, failure in error.worker_failures.items()} | dict(silent)
    if silent:
        return silent
    if isinstance(error, RayActorError):
        return dict.fromkeys(range(trial.workers), "Ray Train's controller was killed or crashed")
    if not isinstance(error, TrainingFailedError):
        raise error
    # The controller's own error says in its first line only that it is one.
    said = first_line(error.controller_failure if isinstance(error, ControllerError) else error)
    why = f": {said}"
    if "timed out" in said:
        room, limit_s = cluster.count_room(trial, running=0), trial.experiment.parallel.start_timeout_s
        why = f". Room for {counted(room, 'worker')} was free within parallel.start_timeout_s ({limit_s:g} s)."
    raise ResourceError(f"Ray could not start {cluster.asked_for(trial)}{why}")


def _describe_loss(failure: BaseException) -> str:
    if isinstance(died := getattr(failure, "health_check_failure", None), RayActorError):  # Ray doesn't know more
        if "its node has died" in str(died):  # about a minute after the node's link was cut
            return "its node ended or is unreachable"
        return "its process was killed (out of memory?) or crashed"
    return f"{type(failure).__name__}: {first_line(failure)}"

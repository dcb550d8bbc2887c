"""Launcher for workers under Ray Train, on this machine or across the nodes of a cluster.

It starts a local Ray unless ``parallel.address`` or RAY_ADDRESS names a cluster. All trials of a run share it.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import ray
from ray.exceptions import RayActorError, RayError
from ray.train import ControllerError, FailureConfig, RunConfig, ScalingConfig, TrainingFailedError, WorkerGroupError

from pipeline.errors import ResourceError
from pipeline.experiment.schema import Experiment, Parallel
from pipeline.launch import base
from pipeline.launch._ray import early, local
from pipeline.launch._ray.early import local_ray
from pipeline.launch._ray.interface import public_because
from pipeline.launch._ray.network import RendezvousConfig
from pipeline.launch._ray.work import work
from pipeline.launch.cluster import join
from pipeline.launch.cluster import placement as places
from pipeline.launch.cluster.autoscaling import NodeRequest
from pipeline.launch.cluster.code import sent, to_send
from pipeline.launch.cluster.connection import outside_main_thread
from pipeline.launch.cluster.fit_nodes import Check, FitNodes
from pipeline.launch.cluster.join import connected
from pipeline.launch.cluster.ray_internals import has_autoscaler
from pipeline.plan import resources
from pipeline.plan.resources import Resources
from pipeline.protocol.channel import Address
from pipeline.protocol.events import Warned
from pipeline.protocol.trial import Baseline, Training, Trial
from pipeline.protocol.trial_outcome import Outcome
from pipeline.system import stages
from pipeline.system.process import environment
from pipeline.train.storage import address_of
from pipeline.wording import first_line

if TYPE_CHECKING:
    from pipeline.launch._ray.fast.driver_controller import FastTrainer
    from pipeline.launch._ray.public_trainer import PublicTrainer

_AFTER_OTHERS_S = 30.0
"""Seconds after ``parallel.timeout_s`` in which waiting ranks give up and Ray may notice a dead node."""
_LAST_POLL_S = 5.0  # a poll that is under way
_LIMITS = {"max_failures", "controller_failure_limit", "max_preemption_failures"}
"""Limits on restarts by Ray Train: none, as the driver restarts workers itself. Not all releases have the last one."""
_NODE_DIED = "its node has died"  # in Ray's message, about a minute after the node's link was cut
_SHOWN = 5  # untracked files


class Launcher(base.Launcher):
    """Runs each trial with Ray Train V2."""

    def __init__(self, session: base.Session) -> None:
        super().__init__(session)
        self._address = session.parallel.cluster
        self._running = 0  # workers
        self._fit_nodes: FitNodes | None = None  # for a local Ray
        self._request: NodeRequest | None = None  # without an autoscaler
        self._public_because = public_because()

    @classmethod
    @contextmanager
    def preparing(cls, experiment: Experiment, *, verbose: bool = False) -> Iterator[None]:
        """Start a local Ray; the workers have Python's hashes from the experiment's seed."""
        with environment(PYTHONHASHSEED=os.environ.get("PYTHONHASHSEED", str(experiment.seed % 2**32))):
            early.begin(experiment, verbose=verbose)
            try:
                yield
            finally:
                early.end_begun()

    def __enter__(self) -> Self:
        """Connect to Ray. An existing cluster receives the code; a local Ray needs none.

        Raises:
            ResourceError: no cluster answers, or the code can't be sent.
        """
        session, is_joined = self.session, self._address is not None
        stages.begin("connecting to Ray" if is_joined else "starting Ray")
        package = to_send(joined=is_joined)
        self._untracked = tuple(map(str, package.untracked_code)) if package else ()
        with join.naming_address(session.parallel), ExitStack() as stack:
            self._code, runtime_env = stack.enter_context(sent(package, joined=is_joined))
            if self._address is None:
                stack.enter_context(local_ray(session.parallel, verbose=session.verbose))
            else:
                stack.enter_context(connected(self._address, verbose=session.verbose, runtime_env=runtime_env))
                self._fit_nodes = FitNodes(session.parallel, code=self._code, unfit={})
                stack.callback(self._fit_nodes.close)
                if has_autoscaler():
                    self._request = NodeRequest()
                    stack.callback(self._request.withdraw)
            self.held = stack.pop_all()
        return self

    @staticmethod
    def resources(parallel: Parallel) -> Resources:
        """Return the resources of this machine, or of all nodes of the cluster."""
        address = parallel.cluster
        with join.naming_address(parallel):
            to_send(joined=address is not None)  # raises what is wrong with the code before anything is started
            return resources.detect() if address is None else join.cluster_resources(address, parallel)

    def check_nodes(self, trial: Trial) -> None:
        """Check the cluster's nodes that are new."""
        if self._fit_nodes is not None:
            self._fit_nodes.check(self._check(trial), needs_room=self._request is None)

    def request_nodes(self, trial: Trial, *, workers: int) -> None:
        """Ask the cluster's autoscaler, if there is one."""
        if self._request is None or not self._request.make(trial, workers=workers):
            return
        asked = places.asked_for(trial.model_copy(update={"workers": workers}))
        patience_s = trial.experiment.parallel.start_timeout_s
        wait = "" if self._running else f". Waiting up to {patience_s:g} s (parallel.start_timeout_s)."
        self._warn(f"requested nodes from the cluster's autoscaler for {asked}{wait}", trial)

    def capacity(self, trial: Trial) -> int:
        """Return the workers that fit on reachable nodes that have passed the checks, running ones included."""
        try:
            if self._request is not None:
                self._request.free_if_met()
            return self._running + places.free(trial, self._nodes(trial))
        except RayError:  # the head doesn't answer: the workers end, too
            return self._running

    def launch(self, trial: Trial) -> Outcome:
        """Run the trial; see `pipeline.launch.base.Launcher`."""
        attempt = self.attempt(trial)
        if self._public_because:
            slower = "Workers take longer to start. Results are not affected."
            self._warn(f"Using Ray's public API because {self._public_because}. {slower}", trial)
            self._public_because = ""
        places.await_death_notices(timeout_s=trial.experiment.parallel.start_timeout_s)
        self._warn_untracked(trial)
        self.check_nodes(trial)
        self._await_capacity(trial)
        host = local.LOOPBACK if self._address is None else ray.util.get_node_ip_address()
        with attempt.listening(host) as address, environment(**_patience(trial)):
            error = self._train(attempt.trial, address)
        return attempt.outcome(_losses(error, trial, silent=attempt.silent))

    def _await_capacity(self, trial: Trial) -> None:
        wait = partial(
            places.await_capacity, trial, nodes=partial(self._nodes, trial), warn=partial(self._warn, trial=trial)
        )
        if self._request is None:
            wait()
            return
        try:
            ask = partial(self.request_nodes, trial, workers=trial.workers)
            wait(ask=ask)
        finally:
            self._request.withdraw()  # else it would compete with the workers

    def _nodes(self, trial: Trial) -> list[dict[str, Any]]:
        """Return Ray's records of the nodes that can have workers now."""
        return places.usable_nodes() if self._fit_nodes is None else self._fit_nodes.poll(self._check(trial))

    def _check(self, trial: Trial) -> Check:
        return Check(trial, self._checkpoints(trial), warn=partial(self._warn, trial=trial))

    def _warn_untracked(self, trial: Trial) -> None:
        if self._untracked:
            what = f"not sent to the cluster, because git does not track them: {_listed(self._untracked)}"
            self._warn(f"{what}. To send them, use git add.", trial)
            self._untracked = ()

    def _checkpoints(self, trial: Trial) -> str | None:
        """Return the address of the checkpoints, also for the baseline: it runs first, so a mistake shows early."""
        options = trial.experiment.checkpoint
        if not (isinstance(trial, Training | Baseline) and options.keep):
            return None
        return address_of(options.directory, run=self.session.folder)

    def _warn(self, message: str, trial: Trial) -> None:
        self.session.receive(Warned(trial=trial.name, message=message))

    def _train(self, trial: Trial, address: Address) -> BaseException | None:
        self._running = trial.workers
        try:
            trainer = self._trainer(trial, address)
            # At Ctrl-C the local Ray is about to end, and Ray answers a later poll by starting another one.
            cancel, patience_s = trainer.cancel, _LAST_POLL_S
            return outside_main_thread(trainer.fit, name="ray-train", interrupt=cancel, patience_s=patience_s)
        finally:
            self._running = 0

    def _trainer(self, trial: Trial, address: Address) -> "FastTrainer | PublicTrainer":
        parallel = trial.experiment.parallel
        labels = self._fit_nodes.selector() if self._fit_nodes is not None else {}
        return _trainer_class()(
            work,
            train_loop_config={
                "trial": trial.model_dump_json(),
                "channel": str(address),
                "code": self._code.model_dump_json(),
                "logs": None if self.session.verbose else str(self.session.log_folder(trial).resolve()),
            },
            backend_config=RendezvousConfig(),
            scaling_config=ScalingConfig(
                num_workers=trial.workers,
                use_gpu=trial.device == "cuda",
                resources_per_worker=places.per_worker(trial),
                placement_strategy=parallel.placement.upper(),
                **({"label_selector": labels} if labels else {}),
            ),
            run_config=RunConfig(
                name=trial.name,
                storage_path=str((self.session.folder / "ray").resolve()),
                failure_config=FailureConfig(**{own.name: 0 for own in fields(FailureConfig) if own.name in _LIMITS}),
            ),
        )


def _trainer_class() -> "type[FastTrainer | PublicTrainer]":
    if public_because():
        from pipeline.launch._ray.public_trainer import PublicTrainer

        return PublicTrainer
    from pipeline.launch._ray.fast.driver_controller import FastTrainer

    return FastTrainer


def _patience(trial: Trial) -> dict[str, str]:
    """Return Ray Train's settings as environment variables: timeouts, and no process that watches for draining nodes.

    It asks twice a second if its workers have ended, not every two seconds. The hang detector finds hanging ranks;
    Ray's health check is for ranks whose node is gone. The driver itself asks for draining nodes, see `departures`.
    """
    parallel = trial.experiment.parallel
    return {
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": f"{parallel.start_timeout_s:g}",
        "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": f"{parallel.timeout_s + _AFTER_OTHERS_S:g}",
    }


def _losses(error: BaseException | None, trial: Trial, *, silent: Mapping[int, str]) -> Mapping[int, str]:
    """Return how workers ended, by rank, from the trainer's error and the ranks of other nodes that became silent.

    Raises:
        ResourceError: Ray could not start the workers, or a worker can't connect to the driver.
        BaseException: the trainer's error, if it says nothing of workers.
    """
    if error is None:
        return {}
    if isinstance(error, WorkerGroupError):
        for failure in error.worker_failures.values():
            if isinstance(failure, ResourceError):  # others are reported to the driver by the worker
                raise failure
        return {rank: _how(failure) for rank, failure in error.worker_failures.items()} | dict(silent)
    if silent:
        return silent
    if isinstance(error, TrainingFailedError):
        # The controller's own error says in its first line only that it is one.
        cause = error.controller_failure if isinstance(error, ControllerError) else error
        raise ResourceError(f"Ray could not start {places.asked_for(trial)}: {first_line(cause)}")
    raise error


def _how(failure: BaseException) -> str:
    if isinstance(died := getattr(failure, "health_check_failure", None), RayActorError):  # Ray doesn't know more
        if _NODE_DIED in str(died):
            return "its node ended or is unreachable"
        return "its process was killed (out of memory?) or crashed"
    return f"{type(failure).__name__}: {first_line(failure)}"


def _listed(paths: tuple[str, ...]) -> str:
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return ", ".join(paths[:_SHOWN]) + more

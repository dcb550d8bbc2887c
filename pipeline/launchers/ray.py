"""Workers that Ray Train places, on this machine or across the nodes of a cluster.

A local Ray is started unless ``parallel.address`` or RAY_ADDRESS names a cluster. One Ray serves all trials of a run.
"""

import threading
from contextlib import ExitStack
from typing import Self

import ray
from ray.exceptions import RayActorError
from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError, WorkerGroupError
from ray.train.torch import TorchConfig, TorchTrainer

from pipeline import resources
from pipeline.channel import Address, Inbox
from pipeline.config.schema import Parallel
from pipeline.contract import Trial
from pipeline.errors import ResourceError
from pipeline.launchers import _ray_cluster as cluster
from pipeline.launchers._ray_work import work
from pipeline.launchers._vigil import Vigil
from pipeline.launchers.base import Session, WorkersLost, environment
from pipeline.resources import Resources


class Launcher:
    """Runs each trial as a ``TorchTrainer`` of Ray Train V2."""

    many_processes = True

    def __init__(self, session: Session) -> None:
        self.session = session
        self._address = cluster.cluster_address(session.parallel)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(cluster.connected(self._address, verbose=self.session.verbose))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @staticmethod
    def resources(parallel: Parallel) -> Resources:
        """This machine, or all nodes of the cluster."""
        address = cluster.cluster_address(parallel)
        return resources.detect() if address is None else cluster.cluster_resources(address)

    def launch(self, trial: Trial) -> None:
        """Run the trial; see `pipeline.launchers.base.Launcher`."""
        cluster.await_room(trial)
        host = cluster.LOOPBACK if self._address is None else ray.util.get_node_ip_address()
        vigil = Vigil(trial, receive=self.session.receive)
        inbox = Inbox(host=host, receive=vigil.receive, folder=self.session.folder)
        patience = f"{trial.experiment.parallel.start_timeout_s:g}"
        stoppable = self.session.stop.telling(inbox.ask_to_stop)
        with vigil, inbox, stoppable, environment(RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S=patience):
            error = _fit(self._trainer(trial, inbox.address))
        if isinstance(error, WorkerGroupError):
            raise WorkersLost({rank: _how(failure) for rank, failure in error.worker_failures.items()})
        if isinstance(error, TrainingFailedError):
            raise ResourceError(f"Ray could not start {cluster.asked_for(trial)}: {cluster.first_line(error)}")
        if error is not None:
            raise error

    def _trainer(self, trial: Trial, address: Address) -> TorchTrainer:
        parallel = trial.experiment.parallel
        return TorchTrainer(
            work,
            train_loop_config={
                "trial": trial.model_dump_json(),
                "channel": address.model_dump_json(),
                "logs": None if self.session.verbose else str(self.session.log_folder(trial).resolve()),
            },
            torch_config=TorchConfig(
                backend="nccl" if trial.device == "cuda" else "gloo", timeout_s=int(parallel.timeout_s)
            ),
            scaling_config=ScalingConfig(
                num_workers=trial.workers,
                use_gpu=trial.device == "cuda",
                resources_per_worker=cluster.per_worker(trial),
            ),
            run_config=RunConfig(
                name=trial.name,
                storage_path=str((self.session.folder / "ray").resolve()),
                failure_config=FailureConfig(max_failures=0, controller_failure_limit=0),
            ),
        )


def _fit(trainer: TorchTrainer) -> BaseException | None:
    """Run the trainer; returns its error.

    It runs in a thread, because in the main thread Ray would replace the handler of Ctrl-C and end this process.
    """
    errors: list[BaseException] = []

    def fit() -> None:
        try:
            trainer.fit()
        except BaseException as error:  # noqa: BLE001 - it is raised again in the main thread
            errors.append(error)

    thread = threading.Thread(target=fit, name="ray-train", daemon=True)
    thread.start()
    thread.join()
    return errors[0] if errors else None


def _how(failure: BaseException) -> str:
    if isinstance(getattr(failure, "health_check_failure", None), RayActorError):  # Ray doesn't know more
        return "its process was killed (out of memory?) or crashed"
    return f"{type(failure).__name__}: {cluster.first_line(failure)}"

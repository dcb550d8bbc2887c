"""Workers that Ray Train places, on this machine or across the nodes of a cluster.

A local Ray is started unless ``parallel.address`` or RAY_ADDRESS names a cluster. One Ray serves all trials of a run.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import ray
import ray.train
from ray.exceptions import RayActorError
from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError, WorkerGroupError
from ray.train.torch import TorchConfig, TorchTrainer

from pipeline import resources, worker
from pipeline.channel import Address, ChannelOutbox, Inbox
from pipeline.config.schema import Parallel
from pipeline.contract import Rank, Trial
from pipeline.errors import ResourceError
from pipeline.launchers.base import Session, WorkersLost, environment, own_signals
from pipeline.resources import Resources

_LOOPBACK = "127.0.0.1"
_OBJECT_STORE_BYTES = 200_000_000  # events go over the channel and data is loaded by the workers
_SETTINGS = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # the end of a trial waits for this poll
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # would print twice what user code prints
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # workers stay where relative paths of the experiment mean something
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",  # would start processes that nobody asked for
}


class Launcher:
    """Runs each trial as a ``TorchTrainer`` of Ray Train V2."""

    many_processes = True

    def __init__(self, session: Session) -> None:
        self._session = session
        self._address = _cluster_address(session.parallel)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(_connected(self._address, verbose=self._session.verbose))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @staticmethod
    def resources(parallel: Parallel) -> Resources:
        """This machine, or all nodes of the cluster."""
        here = resources.detect()
        if (address := _cluster_address(parallel)) is None:
            return here
        with _connected(address, verbose=False):
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return Resources(
            cpus=int(sum(node.get("CPU", 0) for node in nodes)),
            memory_mb=int(sum(node.get("memory", 0) for node in nodes)) // 2**20,
            gpus=("GPU",) * int(sum(node.get("GPU", 0) for node in nodes)),
            node=f"Ray cluster at {address}",
            nodes=len(nodes),
        )

    def launch(self, trial: Trial) -> None:
        """Run the trial; see `pipeline.launchers.base.Launcher`."""
        self._await_room(trial)
        host = _LOOPBACK if self._address is None else ray.util.get_node_ip_address()
        with Inbox(host=host, receive=self._session.receive, folder=self._session.folder) as inbox:
            error = _fit(self._trainer(trial, inbox.address))
        if isinstance(error, WorkerGroupError):
            raise WorkersLost({rank: _how(failure) for rank, failure in error.worker_failures.items()})
        if isinstance(error, TrainingFailedError):
            raise ResourceError(f"Ray could not start {_asked(trial)}: {_first_line(error)}")
        if error is not None:
            raise error

    def _trainer(self, trial: Trial, address: Address) -> TorchTrainer:
        parallel = trial.experiment.parallel
        return TorchTrainer(
            _work,
            train_loop_config={
                "trial": trial.model_dump_json(),
                "channel": address.model_dump_json(),
                "logs": None if self._session.verbose else str(self._session.log_folder(trial).resolve()),
            },
            torch_config=TorchConfig(
                backend="nccl" if trial.device == "cuda" else "gloo", timeout_s=int(parallel.timeout_s)
            ),
            scaling_config=ScalingConfig(
                num_workers=trial.workers, use_gpu=trial.device == "cuda", resources_per_worker=_per_worker(trial)
            ),
            run_config=RunConfig(
                name=trial.name,
                storage_path=str((self._session.folder / "ray").resolve()),
                failure_config=FailureConfig(max_failures=0, controller_failure_limit=0),
            ),
        )

    def _await_room(self, trial: Trial) -> None:
        """Wait until the workers fit. Ray itself would wait for ever, with a traceback a minute.

        Raises:
            ResourceError: the cluster is too small, or not free within ``parallel.start_timeout_s``.
        """
        asked = {name: amount * trial.workers for name, amount in _per_worker(trial).items()}
        if not _covers(ray.cluster_resources(), asked):
            raise ResourceError(f"asked for {_asked(trial)}; the Ray cluster has {_amounts(ray.cluster_resources())}")
        deadline = time.monotonic() + trial.experiment.parallel.start_timeout_s
        while not _covers(ray.available_resources(), asked):
            if time.monotonic() > deadline:
                raise ResourceError(
                    f"asked for {_asked(trial)}; the Ray cluster has {_amounts(ray.cluster_resources())}, of which "
                    f"{_amounts(ray.available_resources())} came free within parallel.start_timeout_s, "
                    f"{trial.experiment.parallel.start_timeout_s:g} s"
                )
            time.sleep(0.2)


def _work(config: dict[str, Any]) -> None:
    """What Ray runs in each worker process."""
    trial = Trial.model_validate_json(config["trial"])
    context = ray.train.get_context()
    rank = Rank(
        rank=context.get_world_rank(),
        local_rank=context.get_local_rank(),
        world_size=context.get_world_size(),
        local_world_size=context.get_local_world_size(),
        node=os.uname().nodename,
    )
    if config["logs"]:
        _redirect_output(Path(config["logs"]), rank=rank)
    with ChannelOutbox(Address.model_validate_json(config["channel"])) as outbox:
        worker.run(trial, rank=rank, outbox=outbox)


def _redirect_output(folder: Path, *, rank: Rank) -> None:
    """Keep what this rank prints in the run's folder, where the node can reach it; else Ray's own logs have it."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        for stream, name in ((sys.stdout, "stdout"), (sys.stderr, "stderr")):
            stream.flush()
            with (folder / f"rank{rank.rank}-{name}.log").open("ab") as file:
                os.dup2(file.fileno(), 1 if name == "stdout" else 2)


@contextmanager
def _connected(address: str | None, *, verbose: bool) -> Iterator[None]:
    """A local Ray that listens on loopback only, or a cluster that was there before.

    Raises:
        ResourceError: there is no cluster at that address.
    """
    local: dict[str, Any] = {
        "address": "local",
        "include_dashboard": False,
        "num_cpus": resources.detect().cpus,
        "object_store_memory": _OBJECT_STORE_BYTES,
        "_node_ip_address": _LOOPBACK,
    }
    level = logging.INFO if verbose else logging.ERROR
    logging.getLogger("ray").setLevel(level)
    # Ray turns its token authentication on and redirects breakpoint(), both by setting variables in this process.
    with environment(**_SETTINGS, RAY_AUTH_MODE=None, PYTHONBREAKPOINT=None), own_signals():
        try:
            ray.init(
                **(local if address is None else {"address": address}),
                log_to_driver=verbose,
                logging_level=level,
                configure_logging=verbose,
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            where = "a local Ray could not be started" if address is None else f"no Ray cluster answers at {address}"
            raise ResourceError(f"{where}: {_first_line(error)}") from error
        try:
            yield
        finally:
            ray.shutdown()


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


def _cluster_address(parallel: Parallel) -> str | None:
    return parallel.address or os.environ.get("RAY_ADDRESS") or None


def _per_worker(trial: Trial) -> dict[str, float]:
    amounts: dict[str, float] = {"CPU": trial.cpus_per_worker}
    if trial.device == "cuda":
        amounts["GPU"] = trial.devices_per_worker
    return amounts


def _covers(there: Mapping[str, float], asked: Mapping[str, float]) -> bool:
    return all(there.get(name, 0) >= amount for name, amount in asked.items())


def _asked(trial: Trial) -> str:
    return f"{trial.workers} workers with {_amounts(_per_worker(trial))} each"


def _amounts(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{amounts.get(name, 0):g} {name}" for name in ("CPU", "GPU") if name in amounts) or "no CPU"


def _how(failure: BaseException) -> str:
    if isinstance(getattr(failure, "health_check_failure", None), RayActorError):  # Ray doesn't know more
        return "its process was killed (out of memory?) or crashed"
    return f"{type(failure).__name__}: {_first_line(failure)}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

"""Ray Train's trainer with its controller in this process: the actors that Ray starts delay the first step by seconds.

Ray Train starts an actor for the controller, one that cleans up if the controller is killed, one that asks an
autoscaler for nodes, one for datasets, and one that synchronizes ranks that report checkpoints. Each is a process that
imports Ray, and workers wait for three of them. Here the driver is the controller: if it is killed, its job ends, and
with it the workers and their placement group. The launcher asks an autoscaler for nodes before, and ranks report
to the driver. See docs/decisions/0011-time-to-first-step.md.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import ray
from ray.train.v2._internal.callbacks import DatasetsCallback, StateManagerCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.execution.callback import RayTrainCallback
from ray.train.v2._internal.execution.context import TrainRunContext
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
from ray.train.v2._internal.execution.worker_group import Worker, WorkerGroup, state, worker_group
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.api.result import Result

from pipeline.launch._ray.fast.patching import replaced


class FastTrainer(DataParallelTrainer):  # type: ignore[misc]
    """A `DataParallelTrainer` of fixed size that polls its workers from the calling thread."""

    _cancel: Callable[[], object] | None = None

    def cancel(self) -> None:
        """Stop polling; `fit`, which is in another thread, ends with CancelledError."""
        if self._cancel is not None:
            with suppress(RuntimeError):  # it has ended
                self._cancel()

    def _create_default_callbacks(self) -> list[RayTrainCallback]:
        without = (PlacementGroupCleanerCallback, StateManagerCallback, DatasetsCallback)
        return [callback for callback in super()._create_default_callbacks() if not isinstance(callback, without)]

    def _initialize_and_run_controller(self, **arguments: Any) -> Result:
        arguments["scaling_policy"] = _FixedSize(self.scaling_config)
        controller = _Controller(**arguments)
        with replaced(worker_group, SynchronizationActor=_NoActor()), replaced(state, _shutdown_sync_actor=_end):
            asyncio.run(self._poll(controller))
        return controller.get_result()

    async def _poll(self, controller: TrainController) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._cancel = partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel)
        await controller.run()


class _NoActor:
    """Replacement of the actor that synchronizes ranks."""

    def options(self, **_: object) -> "_NoActor":
        return self

    def remote(self, **_: object) -> "_NoActor":
        return self


def _end(_: _NoActor) -> None:
    """End nothing: there is no process."""


class _FixedSize(FixedScalingPolicy):  # type: ignore[misc]
    """Asks for nodes by the placement group only."""

    def after_controller_start(self, train_run_context: TrainRunContext) -> None:
        pass

    def _maybe_send_resource_request(self) -> None:
        pass


class _WorkerGroup(WorkerGroup):  # type: ignore[misc]
    @staticmethod
    def _get_worker_runtime_env(custom_runtime_env: dict[str, Any]) -> dict[str, Any]:
        """Return the environment of Ray's processes if this one started them: prestarted ones can be workers then."""
        if (own := ray._private.worker._global_node) is not None and own.is_head():
            return custom_runtime_env
        return dict(WorkerGroup._get_worker_runtime_env(custom_runtime_env))

    def _init_train_context_on_workers(
        self, workers: list[Worker], sync_actor: Any, train_context_args: dict[str, list[Any]]
    ) -> None:
        """Do as Ray's own method, without the two actors that synchronize ranks and keep checkpoints sent to Ray."""
        ray.get(
            [
                worker.actor.init_train_context.remote(
                    train_run_context=self._train_run_context,
                    distributed_context=worker.distributed_context,
                    synchronization_actor=None,
                    storage_context=self._storage_context,
                    worker_callbacks=self._worker_callbacks_to_propagate,
                    controller_actor=None,
                    **{name: values[number] for name, values in train_context_args.items()},
                )
                for number, worker in enumerate(workers)
            ]
        )


class _Controller(TrainController):  # type: ignore[misc]
    worker_group_cls = _WorkerGroup


OVERRIDES: dict[type, tuple[str, ...]] = {
    FastTrainer: ("_create_default_callbacks", "_initialize_and_run_controller"),
    _FixedSize: ("after_controller_start", "_maybe_send_resource_request"),
    _WorkerGroup: ("_get_worker_runtime_env", "_init_train_context_on_workers"),
}
"""Methods of Ray's that are replaced; with other parameters they are another release's."""

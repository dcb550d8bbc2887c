"""What is written down about a checkpoint of a training."""

import time
from importlib.metadata import version

from pipeline.training.checkpoints.manifest import Manifest, trained
from pipeline.training.context import TrainContext


def describe(context: TrainContext, *, step: int, metric: float | None) -> Manifest:
    """The manifest, without files, of a checkpoint after ``step`` steps.

    Args:
        context: what trains.
        step: optimizer steps done.
        metric: the value of ``checkpoint.best``, if it was measured at this step.
    """
    order = context.order
    return Manifest(
        step=step,
        epoch=step // order.steps_per_epoch,
        steps_per_epoch=order.steps_per_epoch,
        global_batch_size=order.global_batch_size,
        world_size=context.rank.world_size,
        time=time.time(),
        versions={name: version(name) for name in ("torch", "ddp-pipeline")},
        experiment=trained(context.experiment),
        data_digest=context.data_digest,
        metric=metric,
        files=(),
    )

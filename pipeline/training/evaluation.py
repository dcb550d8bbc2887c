"""Validation that counts each sample exactly once, at any world size."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from pipeline.config.reported import PREFIX
from pipeline.protocol.events import Phase
from pipeline.protocol.progress import ProgressReporter
from pipeline.training import learned
from pipeline.training.context import TrainContext
from pipeline.training.curves import Curve
from pipeline.training.forward import forward
from pipeline.training.metric_states import merge_lists
from pipeline.training.metric_trial import try_metrics
from pipeline.training.metrics import read
from pipeline.training.optimizer_modes import evaluating
from pipeline.training.watch import mark
from pipeline.training.weighting import weighted

Show = Callable[[str, Curve], None]
"""Gets a curve with its metric's name."""


def prepare(context: TrainContext) -> None:
    """Build the metrics and try them: the first step doesn't wait for them, an epoch isn't lost to them. Collective.

    Raises:
        ExperimentError: one of them can't be built, or doesn't fit the model's outputs or the report.
    """
    if context.validation_loader is not None and not context.trial.is_measurement:
        try_metrics(context)


def evaluate(context: TrainContext, *, show: Show | None = None) -> dict[str, float]:
    """Loss and metrics over the whole validation set, by name ("validation/loss"). Collective; empty without a set.

    ``show`` gets the curves, on all ranks.
    """
    if context.validation_loader is None:
        return {}
    mark(Phase.EVALUATING)
    with resulting_weights(context):
        module = context.strategy.evaluation_module(context.wrapped, context.model)
        module.eval()
        if context.learned is not None:
            learned.take_from_first(context.learned, rank=context.rank, buffers_only=True)
        with learned.evaluating(context.learned):
            sums = _over_own_samples(context, module)
    if context.rank.world_size > 1:
        mark(Phase.WAITING)
        dist.all_reduce(sums)
    mark(Phase.EVALUATING)
    loss, weight = sums.tolist()
    if context.gives_weight:
        loss = loss / weight if weight else math.nan  # the mean over nothing
    values = {f"{PREFIX}loss": loss}
    if (collection := context.metrics) is not None:
        merge_lists(collection, rank=context.rank)
        readings = read(collection.compute(), dict(collection.items(copy_state=False)))
        values.update({f"{PREFIX}{name}": value for name, value in readings.values.items()})
        for name, curve in readings.curves.items():
            if show is not None:
                show(name, curve)
        collection.reset()
    context.wrapped.train()
    return values


@contextmanager
def resulting_weights(context: TrainContext) -> Iterator[None]:
    """Inside, the model is the one that training has for its result. Collective.

    That of averages, or of the optimizer's evaluation mode, if there is either.
    """
    with evaluating(context.optimizer), context.strategy.averaged_weights(context.whole):
        if context.averages is not None:
            context.averages.exchange()
        try:
            yield
        finally:
            if context.averages is not None:
                context.averages.exchange()


@torch.no_grad()
def _over_own_samples(context: TrainContext, module: torch.nn.Module) -> torch.Tensor:
    """A rank's sums, shape (2,), float64 on the device; metrics are updated.

    They are those of losses times weights, and of the weights; of losses without weights the first is its part of the
    mean over the samples.
    """
    assert context.validation_loader is not None
    total = torch.zeros(2, dtype=torch.float64, device=context.device)
    samples, world_size = context.validation_samples, context.rank.world_size
    with ProgressReporter("evaluating", total=samples, unit="samples", silent=not context.rank.is_first) as progress:
        for micro_batch, batch in context.prefetched(
            context.validation_loader.batches(context.evaluation_micro_batches())
        ):
            output = forward(context, module, batch)
            if micro_batch.weight:
                if output.weight is None:
                    total[0] += output.loss.double() * micro_batch.weight
                else:
                    total += weighted(output.loss, output.weight)
                if context.metrics is not None:
                    context.metrics.update(output.outputs, output.targets)
            mark(Phase.EVALUATING)
            progress.by(len(micro_batch.indices) * world_size)
    return total

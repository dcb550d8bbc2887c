"""Validation that counts each sample exactly once, at any world size."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from pipeline.advance import Advance
from pipeline.config.reported import PREFIX
from pipeline.events import Phase
from pipeline.training import learned
from pipeline.training.curves import Curve
from pipeline.training.forward import forward
from pipeline.training.metric_states import merge_lists
from pipeline.training.metric_trial import try_metrics
from pipeline.training.metrics import read
from pipeline.training.optimizer_modes import evaluating
from pipeline.training.setup import Setup
from pipeline.training.watch import mark
from pipeline.training.weighting import weighted

Show = Callable[[str, Curve], None]
"""Gets a curve with its metric's name."""


def prepare(setup: Setup) -> None:
    """Build the metrics and try them: the first step doesn't wait for them, an epoch isn't lost to them. Collective.

    Raises:
        ExperimentError: one of them can't be built, or doesn't fit the model's outputs or the report.
    """
    if setup.validation_loader is not None and not setup.trial.is_measurement:
        try_metrics(setup)


def evaluate(setup: Setup, *, show: Show | None = None) -> dict[str, float]:
    """Loss and metrics over the whole validation set, by name ("validation/loss"). Collective; empty without a set.

    ``show`` gets the curves, on all ranks.
    """
    if setup.validation_loader is None:
        return {}
    mark(Phase.EVALUATING)
    with resulting_weights(setup):
        module = setup.strategy.evaluation_module(setup.wrapped, setup.model)
        module.eval()
        if setup.learned is not None:
            learned.take_from_first(setup.learned, rank=setup.rank, buffers_only=True)
        with learned.evaluating(setup.learned):
            sums = _over_own_samples(setup, module)
    if setup.rank.world_size > 1:
        mark(Phase.WAITING)
        dist.all_reduce(sums)
    mark(Phase.EVALUATING)
    loss, weight = sums.tolist()
    if setup.gives_weight:
        loss = loss / weight if weight else math.nan  # the mean over nothing
    values = {f"{PREFIX}loss": loss}
    if (collection := setup.metrics) is not None:
        merge_lists(collection, rank=setup.rank)
        readings = read(collection.compute(), dict(collection.items(copy_state=False)))
        values.update({f"{PREFIX}{name}": value for name, value in readings.values.items()})
        for name, curve in readings.curves.items():
            if show is not None:
                show(name, curve)
        collection.reset()
    setup.wrapped.train()
    return values


@contextmanager
def resulting_weights(setup: Setup) -> Iterator[None]:
    """Inside, the model is the one that training has for its result. Collective.

    That of averages, or of the optimizer's evaluation mode, if there is either.
    """
    with evaluating(setup.optimizer), setup.strategy.consensus(setup.whole):
        if setup.averages is not None:
            setup.averages.exchange()
        try:
            yield
        finally:
            if setup.averages is not None:
                setup.averages.exchange()


@torch.no_grad()
def _over_own_samples(setup: Setup, module: torch.nn.Module) -> torch.Tensor:
    """A rank's sums, shape (2,), float64 on the device; metrics are updated.

    They are those of losses times weights, and of the weights; of losses without weights the first is its part of the
    mean over the samples.
    """
    assert setup.validation_loader is not None
    total = torch.zeros(2, dtype=torch.float64, device=setup.device)
    samples, world_size = setup.validation_samples, setup.rank.world_size
    with Advance("evaluating", total=samples, unit="samples", silent=not setup.rank.is_first) as advance:
        for draw, batch in setup.prefetched(setup.validation_loader.batches(setup.evaluation_draws())):
            output = forward(setup, module, batch)
            if draw.weight:
                if output.weight is None:
                    total[0] += output.loss.double() * draw.weight
                else:
                    total += weighted(output.loss, output.weight)
                if setup.metrics is not None:
                    setup.metrics.update(output.outputs, output.targets)
            mark(Phase.EVALUATING)
            advance.by(len(draw.indices) * world_size)
    return total

"""Try the metrics on one batch before an epoch depends on them."""

import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from pipeline.config.reported import PREFIX, mlflow_name, source_of
from pipeline.errors import ExperimentError, Problem
from pipeline.training import metrics
from pipeline.training.collectives import gather
from pipeline.training.context import TrainContext
from pipeline.training.forward import forward
from pipeline.training.metric_states import merge_lists
from pipeline.training.nonfinite import Buffers

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection


def try_metrics(context: TrainContext) -> None:
    """Evaluate a batch, the same on all ranks, to see which metrics take it and what they compute. Collective.

    What can't be computed of one batch is left for the evaluation to judge. Weights and buffers stay as they are.

    Raises:
        ExperimentError: a metric refuses the batch, or computes neither numbers nor a curve, or reports a name that is
            taken; or ``checkpoint.best`` names none of the numbers.
    """
    if context.metrics is None:
        return
    collection = context.metrics.clone()  # some, such as MinMaxMetric, keep what they have computed
    with warnings.catch_warnings(action="ignore"):  # about what a batch lacks, such as samples of each class
        problems = list(_updated(context, collection))
        problems = list(dict.fromkeys(one for part in gather(problems, rank=context.rank) for one in part))
        if not problems:
            merge_lists(collection, rank=context.rank)
            problems = list(_judged(collection, best=context.experiment.checkpoint.best))
    if problems:
        raise ExperimentError(problems)


@torch.no_grad()
def _updated(context: TrainContext, collection: "MetricCollection") -> Iterator[Problem]:
    """Update the metrics, one by one, with what the model makes of a batch."""
    buffers = Buffers(context)
    module = context.strategy.evaluation_module(context.wrapped, context.model)
    module.eval()
    output = forward(context, module, context.evaluation_sample())
    context.wrapped.train()
    buffers.restore()
    for name, metric in collection.items(copy_state=False):
        try:
            metric.update(output.outputs, output.targets)
        except Exception as error:  # noqa: BLE001 - whatever a metric raises, it can't take this
            said = " ".join(str(error).split())[:300]
            yield Problem(f"metrics.{name}", f"{type(metric).__name__} raised {type(error).__name__}: {said}")


def _judged(collection: "MetricCollection", *, best: str | None) -> Iterator[Problem]:
    computed = {name: result for name, metric in collection.items(copy_state=False) for result in _computed(metric)}
    taken = {mlflow_name("loss"): "validation/loss"}
    for name, result in sorted(computed.items(), key=lambda one: isinstance(one[1], dict)):
        parts = result if isinstance(result, Mapping) else {name: result}
        try:
            values = metrics.read(parts, {} if isinstance(result, Mapping) else dict(collection.items())).values
        except ExperimentError as error:
            yield from (one._replace(key=f"metrics.{name}") for one in error.problems)
            continue
        for value in values:
            if (written := mlflow_name(value)) in taken:
                message = f"reports {PREFIX}{value}, as {taken[written]} does; give one of them another name"
                yield Problem(f"metrics.{name}", message)
            if not isinstance(result, Mapping):  # torchmetrics tells those of several mappings apart
                taken[written] = f"metrics.{name}"
        source = source_of(best, computed) if best else None
        if source == name and (best or "").removeprefix(PREFIX) not in values:
            known = ", ".join(f"{PREFIX}{value}" for value in list(values)[:8]) or "no number"
            yield Problem("checkpoint.best", f"is {best}, but metrics.{name} reports {known}")


def _computed(metric: "Metric") -> Iterator[Any]:
    """The result, if one batch is enough for it."""
    try:
        yield metric.compute()
    except Exception:  # noqa: BLE001 - such as R2Score's of one sample
        return

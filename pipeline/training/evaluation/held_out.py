"""Validation that counts each sample exactly once, at any world size."""

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import pad

from pipeline.config.reported import PREFIX, mlflow_name, source_of
from pipeline.config.schema import followed
from pipeline.errors import ExperimentError, Problem
from pipeline.protocol.events import Phase
from pipeline.protocol.labels import Split
from pipeline.protocol.progress import ProgressReporter
from pipeline.protocol.trial import Measurement
from pipeline.tasks import OwnEvaluation
from pipeline.training.batches.weighting import weighted
from pipeline.training.context import TrainContext
from pipeline.training.evaluation.metric_states import (
    ListLengths,
    SharedMetrics,
    attributes_outside_states,
    compute_alone,
    in_full_precision,
    unmergeable,
)
from pipeline.training.model import learned
from pipeline.training.model.buffers import Buffers
from pipeline.training.model.metrics import Drawable, read
from pipeline.training.model.optimizers import evaluating
from pipeline.training.model.parameter_names import listed
from pipeline.training.ranks.collectives import from_first, gather
from pipeline.training.ranks.watch import mark, waiting
from pipeline.training.step.forward import forward
from pipeline.training.step.global_batch import evaluation_pass
from pipeline.training.step.logs import agree, with_loss

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection


_log = logging.getLogger(__name__)

Show = Callable[[str, Drawable], None]
"""Receives the metric's name and its curve."""


def build_metrics(context: TrainContext) -> "MetricCollection | None":
    """Build the metrics at the first call; return None in a trial that evaluates nothing.

    It takes a second or two for imports, which belong before the first step: after it they would interrupt the pace.

    Raises:
        ExperimentError: a metric can't be built.
    """
    return context.metrics if context.batches.has_validation and not isinstance(context.trial, Measurement) else None


def prepare(context: TrainContext) -> None:
    """Check the evaluation after the first step: try the metrics on a batch that all ranks have. Collective.

    Metrics that can't be computed from one batch are left to the evaluation. Weights and buffers don't change.

    Raises:
        ExperimentError: a metric can't be built, refuses the batch, computes neither numbers nor a curve, or reports a
            name that is taken; or a key such as ``checkpoint.best`` names none of the numbers; or the task needs whole
            global batches, and ``train.evaluation_batch_size`` is set.
    """
    if context.seen.gathers and context.experiment.train.evaluation_batch_size is not None:
        message = "has no effect: the task compares all samples of a global batch (pipeline.tasks.gathered)"
        raise ExperimentError.of("train.evaluation_batch_size", f"{message}. Remove this key.")
    if (metrics := build_metrics(context)) is None:
        return
    collection = metrics.clone()  # some, such as MinMaxMetric, keep what they have computed
    # It warns, e.g. if the batch lacks samples of a class.
    with warnings.catch_warnings(action="ignore"), context.other_logs():
        problems = list(_updated(context, collection))
        problems = list(dict.fromkeys(one for part in gather(problems, rank=context.rank) for one in part))
        if not problems:
            compute_alone(collection)  # of a batch that all ranks have
            problems = list(
                _judged(collection, logs=context.seen.log_names or (), follows=followed(context.experiment))
            )
    if problems:
        raise ExperimentError(problems)


def evaluate(
    context: TrainContext,
    *,
    split: Split = "validation",
    show: Show | None = None,
    warn: Callable[[str], None] | None = None,
    with_metrics: bool = True,
) -> dict[str, float]:
    """Compute loss and metrics over a split, by name ("validation/loss"); empty without it. Collective.

    ``show`` receives curves and large results, ``warn`` what makes a metric doubtful, on all ranks. Some metrics need
    many samples: ``with_metrics=False`` leaves them out.
    """
    if not context.batches.has(split):
        return {}
    mark(Phase.EVALUATING)
    how = context.experiment.train.compile
    replays = how is not None and how.has_cuda_graphs  # each replay of a CUDA graph overwrites its outputs
    metrics = context.metrics if with_metrics else None
    shared = SharedMetrics(metrics, rank=context.rank, copies=replays) if metrics is not None else None
    with resulting_weights(context):
        module = evaluation_module(context)
        module.eval()
        if context.learned is not None:
            learned.take_from_first(context.learned, rank=context.rank, buffers_only=True)
        with learned.evaluating(context.learned), own_evaluation(context, split=split) as own:
            sums = _over_own_samples(context, module, split=split, shared=shared, lists=own.lists)
            names = ("loss", *(context.seen.log_names or ()))
    if context.rank.world_size > 1:
        with waiting():
            dist.all_reduce(sums)
    mark(Phase.EVALUATING)
    weight, *means = sums.tolist()
    if context.seen.gives_weight:
        means = [total / weight if weight else math.nan for total in means]  # the mean of an empty set
    values = {f"{split}/{name}": mean for name, mean in zip(names, means, strict=True)}
    if shared is not None and metrics is not None:
        shared.merge()
        readings = from_first(lambda: read(metrics.compute(), dict(metrics.items())), rank=context.rank)
        values.update({f"{split}/{name}": value for name, value in readings.values.items()})
        for name, curve in readings.curves.items():
            if show is not None:
                show(name, curve)
        metrics.reset()
        if shared.ambiguous and warn is not None:
            warn(
                f"{listed([f'metrics.{name}' for name in shared.ambiguous])}: some batches of the {split} set have "
                "outputs between 0 and 1 only, and others do not. torchmetrics takes the former for probabilities and "
                "the latter for logits, so the value depends on the batches. Let the model or the task return "
                "probabilities, e.g. torch.sigmoid(logits)"
            )
    values.update({f"{split}/{name}": value for name, value in own.values.items()})
    if isinstance(context.task, OwnEvaluation) and split == "validation":  # whose logs no check could know
        for key, metric in followed(context.experiment).items():
            if metric not in values:
                raise ExperimentError.of(key, f"{metric} is not reported; name one of {', '.join(values)}")
    context.wrapped.train()
    return values


class _OwnMetrics(NamedTuple):
    """Metrics among the modules of a model that evaluates in its own way."""

    lists: ListLengths | None
    values: dict[str, float]
    """Values by log, once the evaluation is over."""


@contextmanager
def own_evaluation(context: TrainContext, *, split: Split) -> Iterator[_OwnMetrics]:
    """Let a task with a method ``own_evaluation`` evaluate in its own way inside the block. Collective.

    It may have other logs there than in training, and metrics of its own among the model's modules, whose paths by log
    it has returned.
    """
    if not isinstance(context.task, OwnEvaluation):
        with context.other_logs():
            yield _OwnMetrics(None, {})
        return
    own = _OwnMetrics(lists := ListLengths(context.model, rank=context.rank), {})
    with context.other_logs(), context.task.own_evaluation(split) as own_paths:
        yield own
    paths = {name: path for part in gather(dict(own_paths), rank=context.rank) for name, path in part.items()}
    if not paths:
        return
    if context.sharded is not None:  # whose ranks evaluate as many batches each, some of them twice
        message = f"logs metrics ({', '.join(paths)}), which are wrong with fsdp, since it repeats batches"
        raise ExperimentError.of("task", f"{message}. Log the values of the metrics, or use ddp.")
    metrics = {name: cast("Metric", context.model.get_submodule(path)) for name, path in sorted(paths.items())}
    lists.merge(nn.ModuleList(metrics.values()))

    def computed() -> dict[str, float]:
        return read({name: metric.compute() for name, metric in metrics.items()}, metrics).values

    own.values.update(from_first(computed, rank=context.rank))
    for metric in metrics.values():
        metric.reset()


@contextmanager
def resulting_weights(context: TrainContext) -> Iterator[None]:
    """Give the model its resulting weights inside the block. Collective.

    They are those of features, such as averages, or those of the optimizer's evaluation mode, if there are any.
    """
    with evaluating(context.optimizer), ExitStack() as stack:
        for feature in context.features:
            stack.enter_context(feature.evaluating())
        yield


def evaluation_module(context: TrainContext) -> nn.Module:
    """Return the module that evaluation calls, with the buffers of rank 0 on all ranks. Collective.

    Buffers such as BatchNorm's running statistics are those of each rank's own share. A wrapper such as DDP's must not
    be called here: it would wait for ranks that have no batch left.
    """
    if context.rank.world_size > 1:
        for buffer in context.model.buffers():
            dist.broadcast(buffer, src=0)
    return context.model if context.sharded is None else context.wrapped


def full_state_dict(context: TrainContext) -> Mapping[str, torch.Tensor]:
    """Return all weights and buffers by their names in the model, on rank 0; ignored elsewhere. Collective."""
    module = evaluation_module(context)
    return module.state_dict() if context.sharded is None else context.sharded.full_state_dict(module)


@torch.no_grad()
def _over_own_samples(
    context: TrainContext,
    module: torch.nn.Module,
    *,
    split: Split,
    shared: SharedMetrics | None,
    lists: ListLengths | None,
) -> torch.Tensor:
    """Evaluate this rank's samples of a split, and update the metrics.

    Returns sums, shape (2 + logs,), float64, on the device: those of weights, of weighted losses and of weighted logs.
    Without weights all but the first are this rank's share of the mean over all samples. Collective.
    """
    total: torch.Tensor | None = None
    samples, world_size = context.batches.size(split), context.rank.world_size
    with ProgressReporter("evaluating", total=samples, unit="samples", silent=not context.rank.is_first) as progress:
        for micro_batch, batch in context.batches.evaluation(split, by_global_batch=context.seen.gathers):
            with evaluation_pass(context, micro_batch):
                output = forward(context, module, batch)
            if micro_batch.weight:
                value = with_loss(output.loss.double(), output, names=context.seen.log_names or ())
                share = value * micro_batch.weight
                part = pad(share, (1, 0)) if output.weight is None else weighted(value, output.weight)
                total = part if total is None else total + part
                if shared is not None:
                    shared.update(output.outputs, output.targets)
                if lists is not None:
                    lists.note()
            mark(Phase.EVALUATING)
            progress.by(len(micro_batch.indices) * world_size)
    context.seen.log_names = agree(context.seen.log_names, rank=context.rank)
    empty = torch.zeros(2 + len(context.seen.log_names), dtype=torch.float64, device=context.device)
    return empty if total is None else total


@torch.no_grad()
def _updated(context: TrainContext, collection: "MetricCollection") -> Iterator[Problem]:
    """Update each metric with the model's outputs for a batch; yield the problems."""
    buffers = Buffers(context.whole)
    module = evaluation_module(context)
    module.eval()
    output = forward(context, module, context.batches.validation_sample())
    context.wrapped.train()
    buffers.restore()
    given = in_full_precision((output.outputs, output.targets))
    for name, metric in collection.items(copy_state=False):
        before = attributes_outside_states(metric)
        try:
            metric.update(*given)
        except Exception as error:  # noqa: BLE001 - a metric may raise anything
            said = " ".join(str(error).split())[:300]
            yield Problem(f"metrics.{name}", f"{type(metric).__name__} raised {type(error).__name__}: {said}")
        if context.rank.world_size > 1 and (reason := unmergeable(metric, before=before)):
            yield Problem(f"metrics.{name}", f"{type(metric).__name__} {reason}")


def _judged(collection: "MetricCollection", *, logs: Sequence[str], follows: Mapping[str, str]) -> Iterator[Problem]:
    computed = {name: result for name, metric in collection.items(copy_state=False) for result in _computed(metric)}
    taken = {mlflow_name("loss"): "validation/loss"} | {mlflow_name(log): "StepOutput.logs" for log in logs}
    for name, result in sorted(computed.items(), key=lambda one: isinstance(one[1], dict)):
        parts = result if isinstance(result, Mapping) else {name: result}
        try:
            values = read(parts, {} if isinstance(result, Mapping) else dict(collection.items())).values
        except ExperimentError as error:
            yield from (one._replace(key=f"metrics.{name}") for one in error.problems)
            continue
        for value in values:
            if (written := mlflow_name(value)) in taken:
                message = f"reports {PREFIX}{value}, and so does {taken[written]}; rename one of them"
                yield Problem(f"metrics.{name}", message)
            if not isinstance(result, Mapping):  # torchmetrics renames equal keys of several mappings
                taken[written] = f"metrics.{name}"
        for key, metric in follows.items():
            if source_of(metric, computed) == name and metric.removeprefix(PREFIX) not in values:
                known = ", ".join(f"{PREFIX}{value}" for value in list(values)[:8]) or "no number"
                yield Problem(key, f"{metric} is not reported; metrics.{name} reports {known}")


def _computed(metric: "Metric") -> Iterator[Any]:
    """Yield the metric's result, if it can be computed from one batch."""
    try:
        yield metric.compute()
    except Exception as error:  # noqa: BLE001 - e.g. R2Score needs two samples; the first evaluation raises what remains
        _log.warning("%s can't be computed from one batch, so it isn't checked", type(metric).__name__, exc_info=error)

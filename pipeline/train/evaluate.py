"""Evaluation that counts each held-out sample exactly once, at any world size, and what follows its values."""

import logging
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from pipeline.errors import ExperimentError, Problem
from pipeline.experiment.reported import PREFIX, mlflow_name, source_of
from pipeline.protocol.events import ArtifactSaved, Phase, Point
from pipeline.protocol.progress import ProgressReporter
from pipeline.protocol.trial import Measurement, Split
from pipeline.protocol.trial_result import Best
from pipeline.tasks import Loss, count_samples, gathering
from pipeline.train import errors
from pipeline.train.checks import check_log_names, check_losses_given
from pipeline.train.hooks import Hook, name_of
from pipeline.train.kept import keep_buffers
from pipeline.train.metrics import (
    Drawable,
    SharedMetrics,
    attributes_outside_states,
    compute_alone,
    convert_to_full_precision,
    find_unmergeable,
    merge,
    read,
)
from pipeline.train.names import TASK, shown
from pipeline.train.optim import evaluating
from pipeline.train.order import MicroBatch, keep_generators, mix, seed_all
from pipeline.train.ranks import broadcast_from_first, copy_from_first, gather
from pipeline.train.state import State
from pipeline.train.watch import mark
from pipeline.wording import first_line

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection

    from pipeline.train.meter import Meter

_LEAST_PIXELS = 48  # Height of an image in a picture, at least; smaller ones are enlarged by a whole number


def send_curve(s: State, name: str, drawn: Drawable) -> None:
    """Send a curve or a large result of the last evaluation from rank 0 as metrics/NAME.csv and .png."""
    if not s.rank.is_first:
        return
    with tempfile.TemporaryDirectory() as folder:
        table, picture = Path(folder) / "curve.csv", Path(folder) / "curve.png"
        drawn.write(table)
        drawn.draw(picture, title=name)
        for path in (table, picture):
            _send(s, path, f"metrics/{quote(name, safe='')}{path.suffix}")


def send_images(s: State, name: str, grid: Tensor) -> None:
    """Send images, as `arrange` returns them, from rank 0 as samples/NAME-STEP.png."""
    if not s.rank.is_first:
        return
    from matplotlib.image import imsave  # takes half a second, needed for pictures only

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "picture.png"
        imsave(path, grid.numpy())
        _send(s, path, f"samples/{quote(name, safe='')}-{s.step:06d}.png")


def _send(s: State, path: Path, place: str) -> None:
    if s.outbox is not None:
        s.outbox.file(path, place)
        s.send(ArtifactSaved(trial=s.trial.name, path=place))


def arrange_images(images: Tensor) -> Tensor:
    """Arrange images (images, channels, height, width) of values from 0 to 1 in a grid: bytes (height, width, 3)."""
    if images.ndim != 4 or images.shape[1] not in (1, 3) or not len(images):
        raise ValueError(f"images have the shape {tuple(images.shape)}, not (images, 1 or 3 channels, height, width)")
    factor = max(1, -(-_LEAST_PIXELS // images.shape[2]))
    pixels = (images.detach().float().cpu().clamp(0, 1) * 255).round().byte().expand(-1, 3, -1, -1)
    framed = pad(pixels.repeat_interleave(factor, 2).repeat_interleave(factor, 3), (1, 1, 1, 1), value=255)
    columns = math.ceil(math.sqrt(len(images)))
    rows = -(-len(images) // columns)
    filled = pad(framed, (0, 0, 0, 0, 0, 0, 0, rows * columns - len(images)), value=255)
    _, channels, height, width = filled.shape
    cells = filled.view(rows, columns, channels, height, width).permute(0, 3, 1, 4, 2)
    return cells.reshape(rows * height, columns * width, channels)


_log = logging.getLogger(__name__)
Show = Callable[[str, Drawable], None]  # Receives the metric's name and its curve


@contextmanager
def resulting_weights(s: State) -> Iterator[None]:
    """Give the model its resulting weights inside the block: those of hooks, and of optimizers' modes. Collective."""
    with evaluating(s.optimizers), ExitStack() as stack:
        for hook in s.hooks:
            stack.enter_context(hook.evaluating(s))
        yield


def share_buffers(s: State) -> None:
    """Overwrite all buffers, which each rank updates from its own samples, with those of rank 0. Collective."""
    copy_from_first(s.trainee.buffers(), rank=s.rank, device=s.device)


@contextmanager
def callable_model(s: State) -> Iterator[None]:
    """Let code call the model itself inside the block: its parameters may be shards outside of a pass. Collective."""
    trainee: Any = s.trainee
    if not s.is_sharded:
        yield
        return
    trainee.unshard()
    try:
        yield
    finally:
        trainee.reshard()


def full_state_dict(s: State) -> Mapping[str, Any]:
    """Return the model's weights and buffers by its own names, on rank 0; ignored elsewhere. Collective.

    If the task has trained parameters, these and its buffers are there, too, by names that begin with "task.".
    """
    share_buffers(s)
    state = s.strategy.full_state_dict(s.trainee)
    trained = {id(one) for group in s.parameters.values() for one in group}
    own = {name: one for name, one in s.trainee.named_parameters(remove_duplicate=False) if name.startswith(TASK)}
    frozen = {name for name, one in own.items() if id(one) not in trained}
    if len(frozen) == len(own):  # the task has nothing trained
        frozen = {name for name in state if name.startswith(TASK)}
    return {shown(name): value for name, value in state.items() if name not in frozen}


# A pass over a set


@torch.no_grad()
def evaluate(
    s: State, *, split: Split = "validation", show: Show | None = None, with_metrics: bool = True
) -> dict[str, float]:
    """Compute loss, logs and metrics over a split, by name ("validation/loss"); empty without it. Collective.

    ``show`` receives curves and large results, on all ranks. Some metrics need many samples: ``with_metrics=False``
    leaves them out.
    """
    if not s.batches.has(split):
        return {}
    mark(Phase.EVALUATING)
    samples, metrics = s.batches.size(split), s.metrics if with_metrics else None
    shared = SharedMetrics(metrics, rank=s.rank, copies=s.copies) if metrics is not None else None
    sums: dict[str, Tensor] = {}
    count: Tensor | float = 0.0
    progress = ProgressReporter("evaluating", total=samples, unit="samples", silent=not s.rank.is_first)
    with resulting_weights(s), _own_evaluation(s, split) as own_values, progress:
        share_buffers(s)
        s.trainee.eval()
        # A wrapper such as DDP's must not be called here: it would wait for ranks that have no batch left.
        for part, batch in s.batches.evaluation(split, by_global_batch=s.facts is not None and s.facts.gathers):
            loss = forward(s, batch, part)
            if loss.count is not None:
                s.batches.skip_row_checks()
            if part.weight:
                items = len(part.indices) if loss.count is None else loss.count.double()
                count = count + items
                terms = {"loss": loss.sum.double()} | {name: log.double() * items for name, log in loss.logs.items()}
                for name, value in terms.items():
                    sums[name] = sums[name] + value if name in sums else value
                if shared is not None:
                    shared.update(loss.outputs, loss.targets)
            mark(Phase.EVALUATING)
            progress.by(len(part.indices) * s.rank.world_size)
    ranks = gather((float(count), {name: float(value) for name, value in sums.items()}), rank=s.rank)
    mark(Phase.EVALUATING)
    total, terms_of = math.fsum(items for items, _ in ranks), {rank: own for rank, (_, own) in enumerate(ranks) if own}
    check_log_names({rank: tuple(own)[1:] for rank, own in terms_of.items()})
    values = {
        f"{split}/{name}": math.fsum(own[name] for own in terms_of.values()) / total if total else math.nan
        for name in next(iter(terms_of.values()), {"loss": 0.0})
    }
    if shared is not None and metrics is not None:
        shared.merge()
        readings = broadcast_from_first(shared.read, rank=s.rank)
        metrics.reset()
        values |= {f"{split}/{name}": value for name, value in readings.values.items()}
        if show is not None:
            for name, curve in readings.curves.items():
                show(name, curve)
    values |= {f"{split}/{name}": value for name, value in own_values.items()}
    if hasattr(s.task, "own_evaluation") and split == "validation":  # whose logs no check could know
        for key, metric in s.experiment.followed.items():
            if metric not in values:
                raise ExperimentError.of(key, f"{metric} is not reported; name one of {', '.join(values)}")
    s.wrapped.train()
    return values


def forward(s: State, batch: Any, part: MicroBatch | None = None) -> Loss:
    """Return the task's loss for a batch in evaluation, which all ranks have alike if ``part`` is None."""
    try:
        if part is None or s.device.type == "cpu":  # others were copied to the GPU in advance
            batch = s.batches.place(batch)
        gathering.current.begin(s, part, exchange=part is not None)
        with s.autocast():
            if not s.experiment.optimizers:
                return cast(Loss, s.trainee(batch))
            losses: dict[str, Tensor] = {}

            def add(name: str, loss: Tensor) -> None:
                key = f"loss_{name}"
                losses[key] = losses[key] + loss if key in losses else loss

            found = s.trainee.with_updates(batch, add)
    except Exception as error:
        errors.explain(error, s, batch, part)
        raise
    check_losses_given(s, [name.removeprefix("loss_") for name in losses])
    samples = len(part.indices) if part is not None else count_samples(batch)
    total = torch.stack(list(losses.values())).sum() * samples
    return found._replace(sum=total, logs={**{name: loss.detach() for name, loss in losses.items()}, **found.logs})


@contextmanager
def _own_evaluation(s: State, split: Split) -> Iterator[dict[str, float]]:
    """Let a task with a method ``own_evaluation`` evaluate in its own way inside the block. Collective.

    Yields the values of the metrics among the model's modules that it has named, known once the block is over.
    """
    values: dict[str, float] = {}
    if not hasattr(s.task, "own_evaluation"):
        yield values
        return
    with s.task.own_evaluation(split) as own_paths:
        yield values
    paths = {name: path for part in gather(dict(own_paths), rank=s.rank) for name, path in part.items()}
    if not paths:
        return
    if s.is_sharded:  # whose ranks evaluate as many batches each, some of them twice
        message = f"logs metrics ({', '.join(paths)}), which are wrong with fsdp, since it repeats batches"
        raise ExperimentError.of("task", f"{message}. Log the values of the metrics, or use ddp.")
    metrics = {name: cast("Metric", s.model.get_submodule(path)) for name, path in sorted(paths.items())}
    merge(nn.ModuleList(metrics.values()), rank=s.rank)
    results = broadcast_from_first(
        lambda: read({name: one.compute() for name, one in metrics.items()}, metrics), rank=s.rank
    )
    values.update(results.values)
    for metric in metrics.values():
        metric.reset()


# What a training does with it


def prepare(s: State) -> None:
    """Check the evaluation after the first step: try the metrics on a batch that all ranks have. Collective.

    Metrics that can't be computed from one batch are left to the evaluation. Weights and buffers don't change.
    """
    if s.facts is not None and s.facts.gathers and s.experiment.train.evaluation_batch_size is not None:
        message = "has no effect: the task compares all samples of a global batch (pipeline.tasks.gathered)"
        raise ExperimentError.of("train.evaluation_batch_size", f"{message}. Remove this key.")
    if not s.batches.has("validation") or isinstance(s.trial, Measurement) or s.metrics is None:
        return
    collection = s.metrics.clone()  # some, such as MinMaxMetric, keep what they have computed
    compute_alone(collection)  # of a batch that all ranks have
    # It warns, e.g. if the batch lacks samples of a class.
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        with keep_buffers(s.trainee):
            share_buffers(s)
            s.trainee.eval()
            loss = forward(s, s.batches.evaluation_sample("validation"))
            s.wrapped.train()
        problems = gather(list(_try_metrics(s, collection, loss)), rank=s.rank)
    if found := dict.fromkeys(one for part in problems for one in part):
        raise ExperimentError(list(found))


def _try_metrics(s: State, collection: "MetricCollection", loss: Loss) -> Iterator[Problem]:
    """Update and compute each metric; yield the problems of those that can't be, and of what they report."""
    given = convert_to_full_precision((loss.outputs, loss.targets))
    taken = {mlflow_name("loss"): "validation/loss"} | {mlflow_name(log): "Loss.logs" for log in loss.logs}
    metrics = dict(collection.items(copy_state=False))
    for name, metric in metrics.items():
        key, kind, before = f"metrics.{name}", type(metric).__name__, attributes_outside_states(metric)
        try:
            metric.update(*given)
        except Exception as error:  # noqa: BLE001 - a metric may raise anything
            yield Problem(key, f"{kind} raised {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            continue
        if s.rank.world_size > 1 and (lost := find_unmergeable(metric, before=before)):
            remedy = "Use add_state with sum, min, max or cat, and put metrics into torch.nn.ModuleList or ModuleDict."
            yield Problem(key, f"{kind} keeps {', '.join(lost)}, which can't be merged over workers. {remedy}")
        try:
            result = metric.compute()
        except Exception as error:  # noqa: BLE001 - e.g. R2Score needs two samples; the evaluation raises what remains
            s.warn(f"{key} is not checked, since {kind} can't be computed from one batch: {first_line(error)}")
            continue
        has_names = isinstance(result, Mapping)  # torchmetrics renames equal ones of several metrics
        try:
            values = read(result if has_names else {name: result}, {} if has_names else metrics).values
        except ExperimentError as error:
            yield from (one._replace(key=key) for one in error.problems)
            continue
        for value in values:
            if (written := mlflow_name(value)) in taken:
                yield Problem(key, f"reports {PREFIX}{value}, and so does {taken[written]}; rename one of them")
            elif not has_names:
                taken[written] = key
        for follower, followed_metric in s.experiment.followed.items():
            if source_of(followed_metric, metrics) == name and followed_metric.removeprefix(PREFIX) not in values:
                known = ", ".join(f"{PREFIX}{value}" for value in list(values)[:8]) or "no number"
                yield Problem(follower, f"{followed_metric} is not reported; {key} reports {known}")


def validate(s: State, meter: "Meter") -> dict[str, float]:
    """Evaluate after the steps done; report the values, and pass them to the hooks. Collective."""
    if hasattr(s.task, "pictures"):
        _draw(s)
    curves: dict[str, Drawable] = {}
    values = evaluate(s, show=curves.__setitem__)
    if not values:
        return values
    meter.send([Point(name, s.step, value) for name, value in values.items()])
    meter.finiteness.judge_validation(values["validation/loss"])
    values = broadcast_from_first(lambda: values, rank=s.rank)
    s.schedules.after_evaluation(values)
    meter.send([point for hook in s.hooks for point in _call_after_evaluation(hook, s, values)])
    for name, curve in curves.items() if s.is_over else ():
        send_curve(s, name, curve)
    return values


def evaluate_test(s: State, *, best: Best | None) -> None:
    """Evaluate the test set, if there is one, with the weights of the result, and report the values. Collective."""
    step = best.step if best else s.step
    values = evaluate(s, split="test", show=lambda name, curve: send_curve(s, f"test {name}", curve))
    s.meter.send([Point(name, step, value) for name, value in values.items()])


def _call_after_evaluation(hook: Hook, s: State, values: Mapping[str, float]) -> list[Point]:
    found = hook.after_evaluation(s, values)
    try:
        points = [Point(name, s.step, float(value)) for name, value in ({} if found is None else found).items()]
    except (AttributeError, TypeError, ValueError):
        message = f"{name_of(hook)}.after_evaluation returned {type(found).__name__}; return numbers by name, or {{}}"
        raise ExperimentError.of("hooks", message) from None
    if wrong := next((point.name for point in points if not isinstance(point.name, str) or point.name in values), None):
        message = f"{name_of(hook)}.after_evaluation returned a value of {wrong}, which is taken; choose another name"
        raise ExperimentError.of("hooks", message)
    return points


def _draw(s: State) -> None:
    """Let the task draw with the resulting weights; rank 0 sends the pictures. Collective.

    All ranks draw, and draw the same random numbers, at every step. No picture may cost the training.
    """
    with resulting_weights(s), callable_model(s), torch.no_grad(), keep_generators(), s.autocast():
        share_buffers(s)
        s.trainee.eval()
        gathering.current.begin(s, None, exchange=False)
        seed_all(mix(s.seed, "pictures"), s.device)
        try:
            drawn = {name: arrange_images(images) for name, images in s.task.pictures(s.model).items()}
        except Exception as error:  # noqa: BLE001 - user code may raise anything
            _log.warning("the task could not draw", exc_info=error)
            drawn = {}
            message = f"the task's pictures could not be drawn: {first_line(error)}. Training is not affected."
            s.warn(message, subject="pictures")
        finally:
            s.wrapped.train()
    for name, grid in drawn.items():
        send_images(s, name, grid)

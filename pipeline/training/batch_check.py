"""Check of an experiment on a few samples: what a training builds, computes and evaluates, without its length."""

from collections.abc import Iterator

from pipeline.protocol.events import Outbox
from pipeline.protocol.trial import BatchCheck, Rank
from pipeline.training import logs
from pipeline.training.build import build
from pipeline.training.context import TrainContext
from pipeline.training.dry_run import first_steps
from pipeline.training.evaluation import evaluate
from pipeline.training.evaluation import prepare as prepare_evaluation
from pipeline.training.loop import advance_by_epoch, check_built
from pipeline.training.order import MicroBatch
from pipeline.training.step import optimizer_step

STEPS = 2
"""Steps to take: ddp raises an error about parameters without a gradient in the step after."""


def check_batch(trial: BatchCheck, *, rank: Rank, outbox: Outbox) -> None:
    """Build a trial, take its first steps and evaluate each held-out set, on a few samples of each.

    Values are not checked: those of a few samples may be infinite, or too few for a metric.

    Raises:
        Exception: whatever the same training would raise, in the same words.
    """
    context = build(trial, rank=rank)
    check_built(context, outbox)
    context.wrapped.train()
    steps = min(STEPS, context.steps, context.order.steps_per_epoch)
    stream = context.batches.load(_few_samples(context, steps=steps, most=trial.samples))
    for step in range(steps):
        optimizer_step(context, stream, step=step)
        if not step:
            context.log_names = logs.agree(context.log_names, rank=rank)
    context.batches.limit_held_out(trial.samples)
    prepare_evaluation(context)
    _ = context.early_stopping  # built at the first access
    for split in ("validation", "test"):
        evaluate(context, split=split, with_metrics=False)
    advance_by_epoch(context)


def _few_samples(context: TrainContext, *, steps: int, most: int) -> Iterator[MicroBatch]:
    """Yield the micro-batches of the first steps, each with its first samples."""
    step: list[MicroBatch] = []
    for micro_batch in first_steps(steps, context.batches.micro_batches(0)):
        step.append(micro_batch._replace(indices=micro_batch.indices[:most]))
        if micro_batch.is_last:
            total = sum(len(each.indices) for each in step)
            yield from (each._replace(weight=len(each.indices) / total, batch_size=total) for each in step)
            step = []

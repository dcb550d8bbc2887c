"""Check of an experiment on a few samples: what a training builds, computes and evaluates, without its length."""

import time
from collections.abc import Sequence

from pipeline.protocol.events import Outbox
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import BatchCheck
from pipeline.training.batches.order import MicroBatch
from pipeline.training.build import build
from pipeline.training.context import TrainContext
from pipeline.training.evaluation.held_out import evaluate
from pipeline.training.evaluation.held_out import prepare as prepare_evaluation
from pipeline.training.start_checks import check_built
from pipeline.training.step import logs, train_step
from pipeline.training.step.dry_run import first_steps, group_by_step

STEPS = 2
"""Steps to take: ddp raises an error about parameters without a gradient in the step after."""
_LIMIT_S = 2.0
"""Seconds that the second step may take, estimated from the first one."""


def check_batch(trial: BatchCheck, *, rank: Rank, outbox: Outbox) -> None:
    """Build a trial, take its first steps and evaluate each held-out set, on a few samples of each.

    Values are not checked: those of a few samples may be infinite, or too few for a metric.

    Raises:
        Exception: whatever the same training would raise, in the same words.
    """
    context = build(trial, rank=rank)
    check_built(context, outbox)
    context.wrapped.train()
    samples = _take_steps(context, trial)
    context.batches.limit_held_out(samples)
    prepare_evaluation(context)
    for split in ("validation", "test"):
        evaluate(context, split=split, with_metrics=False)


def _take_steps(context: TrainContext, trial: BatchCheck) -> int:
    """Take the first steps of the training; return how many samples there is time for."""
    whole_steps = group_by_step(first_steps(STEPS, context.batches.micro_batches(0)))
    samples = trial.samples
    for step in range(min(STEPS, context.steps)):
        micro_batches = _cut(whole_steps[min(step, len(whole_steps) - 1)], samples)
        started = time.monotonic()
        train_step(context, context.batches.load(micro_batches), step=step)
        if not step:
            context.seen.log_names = logs.agree(context.seen.log_names, rank=context.rank)
            in_time = int(samples * _LIMIT_S / (time.monotonic() - started))
            samples = max(samples, min(in_time, trial.most_samples))
    return samples


def _cut(micro_batches: Sequence[MicroBatch], most: int) -> list[MicroBatch]:
    """Return the micro-batches of a step, each with its first samples only."""
    cut = [each._replace(indices=each.indices[:most]) for each in micro_batches]
    total = sum(len(each.indices) for each in cut)
    return [each._replace(weight=len(each.indices) / total, batch_size=total) for each in cut]

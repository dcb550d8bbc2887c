"""Checks of what was built, before the first step of a training or of a check on a few samples."""

from pipeline.protocol.events import Outbox
from pipeline.protocol.trial import Training
from pipeline.training.checks import log_means
from pipeline.training.context import TrainContext
from pipeline.training.evaluation.held_out import build_metrics
from pipeline.training.result import reporting


def check_built(context: TrainContext, outbox: Outbox) -> None:
    """Check what was built, before its first step, and report what there is to train. Collective.

    Raises:
        ExperimentError: a metric can't be built, the scheduler contradicts it, or an evaluation logs no means.
    """
    build_metrics(context)
    reporting.start(context, outbox)
    reporting.changed_matmul_precision(context, outbox)
    if isinstance(context.trial, Training):
        for feature in context.features:
            feature.start(outbox)
        log_means.check(context, outbox)

"""Entry points of a worker: a training or measurement from start to result, and a check on a few samples."""

import time
from pathlib import Path
from tempfile import TemporaryDirectory

from pipeline.protocol.events import Outbox
from pipeline.protocol.trial import BatchCheck, Rank, Training, Trial
from pipeline.protocol.trial_result import TrialResult
from pipeline.train import report, trainer
from pipeline.train.build import build
from pipeline.train.checkpoint import Checkpoints, share_addresses
from pipeline.train.evaluate import evaluate, evaluate_test, prepare
from pipeline.train.kept import compile_ahead
from pipeline.train.measure import add_measurements, result_of
from pipeline.train.meter import Meter
from pipeline.train.state import State

_CHECKED_STEPS = 2  # Steps of a check: ddp raises an error about parameters without a gradient in the step after
_LIMIT_S = 2.0  # Seconds that the second of them may take, estimated from the first one


def train(trial: Trial, *, rank: Rank, outbox: Outbox) -> TrialResult:
    """Run a trial on this rank. All ranks return the same result; rank 0 sends the events. Collective."""
    return complete(build(share_addresses(trial, rank=rank), rank=rank, outbox=outbox))


def complete(s: State) -> TrialResult:
    """Run a trial that is built, see `train`."""
    trial = s.trial
    s.meter = meter = Meter(s)
    begin(s)
    compile_ahead(s)
    best = unsaved = None
    with Checkpoints(s) as checkpoints:
        start = checkpoints.resume()
        trainer.train(s, meter, checkpoints)
        if isinstance(trial, Training):
            best, unsaved = checkpoints.load_best(), checkpoints.find_unsaved()
    with TemporaryDirectory() as folder:
        if isinstance(trial, Training):
            meter.finiteness.summarize()
            evaluate_test(s, best=best)
            report.model(s, folder=Path(folder), best=best)
        result = result_of(s, start=start).model_copy(update={"unsaved": unsaved})
        if best is not None:
            result = result.model_copy(update={"best": best, "metrics": {**result.metrics, **best.metrics}})

        def export() -> None:  # after the result, as it takes memory, which that tells
            if isinstance(trial, Training):
                report.exported_model(trial, s.outbox, folder=Path(folder))

        return add_measurements(s, result, complete=complete, export=export)


def begin(s: State) -> None:
    """Check what was built, before its first step, and report what there is to train. Collective."""
    is_training = isinstance(s.trial, Training)
    if is_training and s.batches.has("validation"):  # imports for a second, which would interrupt the pace later
        judges = dict(s.metrics.items()) if s.metrics is not None else {}
        s.schedules.check_start(judges)
    report.start(s)
    report.report_matmul_precision(s)


def check_batch(trial: BatchCheck, *, rank: Rank, outbox: Outbox) -> None:
    """Build a trial, take its first steps and evaluate each held-out set, on a few samples of each.

    Values are not checked: those of a few samples may be infinite, or too few for a metric.
    """
    s = build(trial, rank=rank, outbox=outbox)
    begin(s)
    s.wrapped.train()
    samples = trial.samples
    for step in range(min(_CHECKED_STEPS, s.steps)):
        parts = [each._replace(indices=each.indices[:samples]) for each in s.batches.parts(step)]
        total = sum(len(each.indices) for each in parts)
        started = time.monotonic()
        s.train_step(s, s.batches.load([each._replace(global_size=total) for each in parts]), step=step)
        if not step:
            in_time = int(samples * _LIMIT_S / (time.monotonic() - started))
            samples = max(samples, min(in_time, trial.most_samples))
            s.schedules.end_epoch()  # which a few steps don't reach
    s.batches.limit_held_out(samples)
    prepare(s)
    for split in ("validation", "test"):
        evaluate(s, split=split, with_metrics=False)

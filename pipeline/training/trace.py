"""A trace of a few steps, for chrome://tracing or ui.perfetto.dev: which operation ran when, on which thread or GPU."""

import tempfile
import time
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from pipeline.protocol.events import ArtifactSaved, Outbox
from pipeline.training.clock import synchronize
from pipeline.training.collectives import barrier
from pipeline.training.context import TrainContext
from pipeline.training.dry_run import endless, without_updates
from pipeline.training.step import MicroBatches, optimizer_step

STEPS = 3
_WARMUP_STEPS = 2  # the profiler's start and what the measurement before left running belong to no step


def record(context: TrainContext, outbox: Outbox) -> None:
    """Record rank 0 while it takes `STEPS` steps with the others. Collective.

    The gzipped trace arrives in the run's folder as ``traces/<trial>.json.gz``. The model stays as it is.
    """
    with without_updates(context):
        stream = endless(context)
        _steps(context, stream, _WARMUP_STEPS)
        if context.rank.is_first:
            # Not the others: one trace is what people look at, and the profiler makes a rank slower.
            with profile(activities=_activities(context)) as profiler:
                _steps(context, stream, STEPS)
            _send(profiler, context, outbox)
        else:
            _steps(context, stream, STEPS)
    barrier(context.rank)  # the others don't leave while rank 0 still writes


def _steps(context: TrainContext, stream: MicroBatches, steps: int) -> None:
    for _ in range(steps):
        optimizer_step(context, stream, step=0)
    synchronize(context.device)


def _activities(context: TrainContext) -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if context.device.type == "cuda" else [])]


def _send(profiler: profile, context: TrainContext, outbox: Outbox) -> None:
    name = f"traces/{context.trial.name}.json.gz"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json.gz"
        profiler.export_chrome_trace(str(path))
        outbox.file(path, name)
    outbox.event(ArtifactSaved(time=time.time(), trial=context.trial.name, path=name))

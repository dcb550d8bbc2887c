"""A trace of a few steps, for chrome://tracing or ui.perfetto.dev: which operation ran when, on which thread or GPU."""

import tempfile
import time
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from pipeline.events import ArtifactSaved, Outbox
from pipeline.training.clock import synchronize
from pipeline.training.collective import barrier
from pipeline.training.setup import Setup
from pipeline.training.standstill import endless, standstill
from pipeline.training.step import Stream, optimizer_step

STEPS = 3
_WARMUP_STEPS = 2  # the profiler's start and what the measurement before left running belong to no step


def record(setup: Setup, outbox: Outbox) -> None:
    """Record rank 0 while it takes `STEPS` steps with the others. Collective.

    The gzipped trace arrives in the run's folder as ``traces/<trial>.json.gz``. The model stays as it is.
    """
    with standstill(setup):
        stream = endless(setup)
        _steps(setup, stream, _WARMUP_STEPS)
        if setup.rank.is_first:
            # Not the others: one trace is what people look at, and the profiler makes a rank slower.
            with profile(activities=_activities(setup)) as profiler:
                _steps(setup, stream, STEPS)
            _send(profiler, setup, outbox)
        else:
            _steps(setup, stream, STEPS)
    barrier(setup.rank)  # the others don't leave while rank 0 still writes


def _steps(setup: Setup, stream: Stream, steps: int) -> None:
    for _ in range(steps):
        optimizer_step(setup, stream, step=0)
    synchronize(setup.device)


def _activities(setup: Setup) -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setup.device.type == "cuda" else [])]


def _send(profiler: profile, setup: Setup, outbox: Outbox) -> None:
    name = f"traces/{setup.trial.name}.json.gz"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json.gz"
        profiler.export_chrome_trace(str(path))
        outbox.file(path, name)
    outbox.event(ArtifactSaved(time=time.time(), trial=setup.trial.name, path=name))

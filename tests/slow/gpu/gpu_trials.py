"""Trials for tests/slow/gpu, run as the commands run them: launcher, process group and journal.

They need CUDA GPUs. In a rehearsal, with GPU_REHEARSAL=1 on a machine without GPUs, they run on the CPU instead, two
ranks over gloo. That shows whether the code of the tests is right, and nothing about GPUs.

Needs neither Ray nor MLflow, as the folder of `make gpu-bundle` has neither.
"""

import os
import sys
import time
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import toys
from torch import Tensor, nn

from pipeline import registry
from pipeline.launch.base import Session
from pipeline.protocol.events import WEIGHTS, Finished, Metrics, Outcome
from pipeline.protocol.trial import Baseline, Trial
from pipeline.protocol.trial_result import TrialResult
from pipeline.record import journal
from pipeline.record.recorder import Recorder
from pipeline.system import environment

IS_REHEARSAL = os.environ.get("GPU_REHEARSAL") == "1" and not torch.cuda.is_available()
DEVICE: Literal["cpu", "cuda"] = "cpu" if IS_REHEARSAL else "cuda"
GPUS = 2 if IS_REHEARSAL else torch.cuda.device_count() if torch.cuda.is_available() else 0
NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="needs a CUDA GPU")]
NEEDS_CUDA = pytest.mark.skipif(IS_REHEARSAL, reason="a rehearsal on the CPU has no memory or kernels of a GPU")
NEEDS_TWO_GPUS = pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs; this machine has {GPUS}")
RANKS = [1, pytest.param(2, marks=NEEDS_TWO_GPUS)]
USERS_ERROR = "a sentence of the user's"


class Faulty(nn.Linear):
    """Raises or hangs on the last rank, as a user's code may.

    Args:
        fault: "raises" or "hangs".
        step: training step, counted from 1, in which it does; 0: while the model is built.
        mark: file that is written right before.
    """

    def __init__(self, fault: str, step: int, mark: str) -> None:
        super().__init__(3, 1)
        self.fault, self.step, self.mark, self.steps = fault, step, mark, 0
        self._enter(0)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
            self._enter(self.steps)
        return super().forward(inputs)

    def _enter(self, step: int) -> None:
        if step != self.step or (dist.is_initialized() and dist.get_rank() < dist.get_world_size() - 1):
            return
        Path(self.mark).touch()
        if self.fault == "raises":
            raise RuntimeError(USERS_ERROR)
        time.sleep(600)


def trial(**wanted: Any) -> Trial:
    """A training in this process, on one GPU."""
    return toys.trial(device=DEVICE, devices_per_worker=int(not IS_REHEARSAL), **wanted)


def on_ranks(made: Trial, ranks: int, **more: Any) -> Trial:
    """The trial with DDP on so many GPUs."""
    launcher = "inprocess" if ranks == 1 else "torchrun"
    return made.model_copy(update={"strategy": "ddp", "workers": ranks, "launcher": launcher, **more})


def with_baseline(made: Trial) -> Trial:
    """The training with a baseline on one GPU."""
    same = ("experiment", "launcher", "devices_per_worker", "device", "cpus_per_worker", "allowed")
    shared = {name: getattr(made, name) for name in same}
    baseline = Baseline(name="baseline", strategy="single", workers=1, **shared)
    return made.model_copy(update={"compared_with": (baseline,)})


def launch(trial: Trial, folder: Path) -> tuple[Outcome, Path]:
    """Run a trial; return its outcome, and the run's folder, which is made in ``folder``."""
    made = folder / str(len(list(folder.iterdir())))
    made.mkdir()
    with environment(PYTHONPATH=os.pathsep.join(sys.path)), closing(Recorder(made, subscribers=[])) as recorder:
        session = Session(folder=made, receive=recorder.receive, parallel=trial.experiment.parallel)
        with registry.load("launchers", trial.launcher).Launcher(session) as launcher:
            return launcher.launch(trial), made


def result_of(outcome: Outcome) -> TrialResult:
    """Return the training's result, or raise its error."""
    if outcome.finished is None:
        raise outcome.error
    return outcome.finished.result


def trained_weights(trial: Trial, folder: Path) -> dict[str, Tensor]:
    """Run a training and return its weights, on the CPU, or raise its error."""
    outcome, made = launch(trial, folder)
    result_of(outcome)
    weights: dict[str, Tensor] = torch.load(made / WEIGHTS, weights_only=True)
    return weights


def baseline_of(outcome: Outcome) -> TrialResult:
    """Return the result of the baseline that a training was compared with."""
    (finished,) = (event for event in outcome.beside if isinstance(event, Finished))
    return finished.result


def speedup_of(outcome: Outcome) -> float:
    """Return the ratio of the rates of a training and its baseline: the median of alternate slots if there are any."""
    training, baseline = result_of(outcome), baseline_of(outcome)
    if not baseline.slots:
        return training.samples_per_second.median / baseline.samples_per_second.median
    return median(own / other for own, other in zip(training.slots, baseline.slots, strict=True))


def series(folder: Path, name: str) -> list[float]:
    events = journal.read(folder / journal.FILE_NAME)
    return [p.value for event in events if isinstance(event, Metrics) for p in event.points if p.name == name]

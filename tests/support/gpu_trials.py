"""Trials on a CUDA GPU, run as the commands run them: launcher, process group and journal.

Needs neither Ray nor MLflow, as the folder of `make gpu-kit` has neither.
"""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import toys

from pipeline import registry
from pipeline.launchers.base import Session
from pipeline.protocol.events import Metrics
from pipeline.protocol.trial import Trial
from pipeline.protocol.trial_outcome import Outcome
from pipeline.protocol.trial_result import TrialResult
from pipeline.recording import journal
from pipeline.recording.recorder import Recorder

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="needs a CUDA GPU")]


def trial(*, train_only: bool = True, **sections: Any) -> Trial:
    """A training in this process, on one GPU."""
    made = toys.trial(**sections)
    update = {"device": "cuda", "devices_per_worker": 1, "train_only": train_only}
    return made.model_copy(update={**update, "allowed": (*made.allowed, "test_gpu", "test_one_gpu")})


def launch(trial: Trial, folder: Path) -> tuple[Outcome, Path]:
    """Run a trial; return its outcome, and the run's folder, which is made in ``folder``."""
    made = folder / str(len(list(folder.iterdir())))
    made.mkdir()
    with closing(Recorder(made, subscribers=[])) as recorder:
        session = Session(folder=made, receive=recorder.receive, parallel=trial.experiment.parallel)
        with registry.load("launchers", trial.launcher).Launcher(session) as launcher:
            return launcher.launch(trial), made


def result_of(outcome: Outcome) -> TrialResult:
    """Return the training's result, or raise its error."""
    if outcome.finished is None:
        raise outcome.error
    return outcome.finished.result


def series(folder: Path, name: str) -> list[float]:
    events = journal.read(folder / journal.FILE_NAME)
    return [p.value for event in events if isinstance(event, Metrics) for p in event.points if p.name == name]

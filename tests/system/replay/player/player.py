"""A launcher whose workers are a recorded journal: what they said is said again, in no time.

Trials that a training is compared with are said by the training, as rank 0 does.

`PLAYED` in the environment names the run's folder. The rest of ``pipeline run`` and ``benchmark`` is the real one:
plan, recorder, terminal, MLflow, report, exit code.
"""

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pipeline.experiment.schema import Parallel
from pipeline.launch import base
from pipeline.plan.resources import Resources
from pipeline.protocol.events import (
    AnyEvent,
    ArtifactSaved,
    CheckpointSaved,
    Failed,
    Finished,
    FirstStep,
    Metrics,
    ModelSaved,
    Outcome,
    Resumed,
    RunClosed,
    Started,
    SystemMetrics,
    TrialOpened,
    Warned,
)
from pipeline.protocol.trial import Training, Trial
from pipeline.record import journal

_WORKERS = (
    Started, FirstStep, Metrics, SystemMetrics, Warned, Failed, Finished, ModelSaved, CheckpointSaved, Resumed
)  # fmt: skip
"""What workers say; all else is the driver's."""


class Launcher(base.Launcher):
    """Says again what the workers of a run have said."""

    def __init__(self, session: base.Session) -> None:
        super().__init__(session)
        self._folder = Path(os.environ["PLAYED"])
        self._launched: Counter[tuple[str, int]] = Counter()

    @staticmethod
    def resources(parallel: Parallel) -> Resources:
        """Of the machine that the recordings are from."""
        return Resources(cpus=2, memory_mb=4096)

    def capacity(self, trial: Trial) -> int:
        """As many as were recorded."""
        return trial.workers

    def launch(self, trial: Trial) -> Outcome:
        """Play one attempt of a trial; see `pipeline.launch.base.Launcher`."""
        attempt = self.attempt(trial)
        number = self._launched[trial.name, trial.repeat]
        self._launched[trial.name, trial.repeat] += 1
        beside = trial.compared_with if isinstance(trial, Training) else ()
        for event in self._said(trial, attempt=number):
            if isinstance(event, ModelSaved):
                if not trial.experiment.tracking.log_model:
                    continue
                shutil.copytree(self._folder / "model", self.session.folder / "model", dirs_exist_ok=True)
            attempt.receive(_in_turn(event) if beside else event)
        for other in beside:
            for event in self._said(other, attempt=0):
                if isinstance(event, Started | Metrics | Finished):
                    attempt.receive(_in_turn(event))
        if self._was_interrupted:
            raise KeyboardInterrupt
        return attempt.outcome()

    def _said(self, trial: Trial, *, attempt: int) -> Iterator[AnyEvent]:
        opened = -1
        is_over = True
        for event in journal.read(self._folder / journal.FILE_NAME):
            if isinstance(event, TrialOpened):
                is_this = (event.trial, event.repeat) == (trial.name, trial.repeat)
                opened, is_over = opened + is_this, not is_this
            is_over |= isinstance(event, ArtifactSaved | RunClosed)
            if opened == attempt and not is_over and isinstance(event, _WORKERS):
                yield event
                is_over = isinstance(event, Finished)

    @property
    def _was_interrupted(self) -> bool:
        end = journal.ending(self._folder / journal.FILE_NAME)
        return end is not None and end.status == "KILLED"


def _in_turn(event: AnyEvent) -> AnyEvent:
    """Give a result slots: those of the training alternate by 2%."""
    if not isinstance(event, Finished):
        return event
    rate, is_main = event.result.samples_per_second.median, event.trial == "main"
    slots = tuple(rate * (1 + 0.02 * is_main) ** (-1 if index % 2 else 1) for index in range(8))
    start_s = event.time_to_first_step_s if is_main else None
    return event.model_copy(
        update={"result": event.result.model_copy(update={"slots": slots}), "time_to_first_step_s": start_s}
    )

"""Trials that rank 0 builds beside its part of a training, to be compared with it: their first steps and their events.

`pipeline.training.turns` measures them in turn with the training.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from pipeline.errors import Stopped
from pipeline.protocol import estimates
from pipeline.protocol.events import AnyEvent, Finished, Outbox, Warned
from pipeline.protocol.trial import Trial
from pipeline.protocol.trial_result import TrialResult
from pipeline.training.build import build
from pipeline.training.context import TrainContext

_log = logging.getLogger(__name__)

Complete = Callable[[TrainContext, Outbox], TrialResult]
"""Runs a trial that is built and returns its result."""


class ComparedTrials:
    """The trials on rank 0 that a training is compared with; on other ranks there are none."""

    def __init__(self, training: TrainContext, *, outbox: Outbox, complete: Complete) -> None:
        self.contexts: dict[str, TrainContext] = {}
        """Trials that have taken their first steps, by name."""
        self._main, self._outbox, self._complete = training.trial.name, outbox, complete
        self._datasets = training.batches.datasets
        self._alone = training.rank.model_copy(update={"world_size": 1, "local_world_size": 1})
        self._outboxes: dict[str, _Later] = {}
        self._results: dict[str, TrialResult] = {}

    @property
    def step_s(self) -> dict[str, float]:
        """Seconds of a step of each trial, by name."""
        return {name: result.step_ms.median / 1000 for name, result in self._results.items()}

    def build(self, trial: Trial) -> None:
        """Build a trial and take its first steps; warn if it can't, for example because the model doesn't fit."""
        torch.set_num_threads(trial.cpus_per_worker)
        later = _Later(self._outbox)
        try:
            context = build(trial, rank=self._alone, datasets=self._datasets)
            result = self._complete(context, later)
        except Stopped:
            return
        except Exception as error:  # noqa: BLE001 - the training is over, and other trials may do
            _log.warning("%s could not be measured", trial.title, exc_info=error)
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
            message = f"{trial.title} could not be measured beside the training: {said}"
            self._outbox.event(Warned(trial=self._main, message=message))
            return
        self.contexts[trial.name], self._outboxes[trial.name] = context, later
        self._results[trial.name] = result

    def finish(self, slots: Mapping[str, Sequence[float]]) -> None:
        """Send the events of each trial, its result with these slots last."""
        for name, result in self._results.items():
            context = self.contexts[name]
            rates, size = slots[name], context.experiment.train.global_batch_size
            result = result.model_copy(
                update={
                    "slots": tuple(rates),
                    "samples_per_second": estimates.geometric_spread(rates),
                    "step_ms": estimates.spread([1000 * size / rate for rate in rates]),
                    "peak_memory_mb": (),  # that of two models and their data
                }
            )
            for event in (*self._outboxes[name].events, Finished(trial=name, result=result)):
                self._outbox.event(event)


class _Later:
    """Outbox that keeps a trial's events until it is known whether it could be measured; sends warnings at once."""

    def __init__(self, outbox: Outbox) -> None:
        self.events: list[AnyEvent] = []
        self._outbox = outbox

    @property
    def stop_asked(self) -> bool:
        return self._outbox.stop_asked

    def event(self, event: AnyEvent) -> None:
        if isinstance(event, Warned):
            self._outbox.event(event)
        elif event.kind in ("started", "metrics"):
            self.events.append(event)

    def file(self, path: Path, name: str) -> None:
        """Send nothing: a measurement has no files."""

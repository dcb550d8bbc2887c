"""Evaluations of a trial, held back until the scheduler has decided on the evaluation before.

A trial trains on while Ray Tune decides. Without this a trial that is stopped would leave evaluations in its curves and
in MLflow which the sweep doesn't count, so that its table and MLflow's would differ.
"""

import logging
import threading

from pipeline.config.reported import PREFIX
from pipeline.protocol.events import AnyEvent, Metrics

_log = logging.getLogger(__name__)
_PATIENCE_S = 5.0
"""Longest wait for a decision: when the sweep is interrupted, none comes."""


class Decisions:
    """Decisions on the evaluations of a trial, and the filter of its events that obeys them.

    Args:
        metric: the sweep's.
        step: step of the last evaluation that has been decided on, in a trial that is resumed.
        patience_s: longest wait for a decision.
    """

    def __init__(self, metric: str, *, step: int = 0, patience_s: float = _PATIENCE_S) -> None:
        self._metric = metric
        self._step = step
        self._patience_s = patience_s
        self._stops = False
        self._decided = threading.Event()
        self._decided.set()

    def proceed(self) -> None:
        """Let the next evaluation pass."""
        self._decided.set()

    def stop(self) -> None:
        """Drop all further evaluations."""
        self._stops = True
        self._decided.set()

    def admit(self, event: AnyEvent) -> AnyEvent | None:
        """Return the event, an evaluation after the decision on the one before; None if nothing of it counts."""
        if not isinstance(event, Metrics) or not any(point.name.startswith(PREFIX) for point in event.points):
            return event
        if not self._decided.wait(self._patience_s):
            _log.warning(
                "recorded an evaluation while the scheduler decides on the one before, for %g s", self._patience_s
            )
        if self._stops:
            others = tuple(point for point in event.points if not point.name.startswith(PREFIX))
            return event.model_copy(update={"points": others}) if others else None
        steps = [point.step for point in event.points if point.name == self._metric and event.trial == "main"]
        if steps and max(steps) > self._step:  # a repeated step is known to the scheduler
            self._step = max(steps)
            self._decided.clear()
        return event

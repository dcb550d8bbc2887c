"""Outlook of a command with several trials: which one runs, and how long all of them still take."""

from collections.abc import Sequence
from itertools import chain
from statistics import mean

from pipeline.protocol.events import Finished, TrialOpened
from pipeline.protocol.trial import Training, Trial
from pipeline.recording.trial_progress import clock, left


class Schedule:
    """Trials of a command in the order of their launches, with the durations of those that have ended.

    Args:
        trials: all trials that are measured, those beside a training included.
    """

    def __init__(self, trials: Sequence[Trial]) -> None:
        beside = (trial.compared_with for trial in trials if isinstance(trial, Training))
        self.beside = {trial.name for trial in chain.from_iterable(beside)}
        """Names of the trials that a training is compared with, which are not launched."""
        self._trials = [trial for trial in trials if trial.name not in self.beside]
        self._durations: dict[str, list[float]] = {}
        self._opened: TrialOpened | None = None

    def update(self, event: TrialOpened | Finished) -> None:
        """Note the launch or the end of a trial."""
        if isinstance(event, TrialOpened):
            self._opened = event
        elif self._opened is not None:
            self._durations.setdefault(self._opened.title, []).append(event.time - self._opened.time)

    @property
    def place(self) -> tuple[int, int]:
        """Number of the running trial, from 1, and the number of all; a trial that is launched again keeps its own."""
        keys = [(trial.name, trial.repeat) for trial in self._trials]
        own = (self._opened.trial, self._opened.repeat) if self._opened else None
        return (keys.index(own) + 1 if own in keys else 0), len(keys)

    def outlook(self, left_s: float | None) -> list[str]:
        """Return the place among several trials, and how long the rest takes as far as that is known.

        Trials take as long as equal ones before; the speedup takes at most about `Measure.limit_s`.

        Args:
            left_s: remaining seconds of the running trial; None if unknown.
        """
        number, total = self.place
        shown = [f"trial {number} of {total}"] if total > 1 and number else []
        if left_s is None or not number:
            return shown
        running, later = self._trials[number - 1], self._trials[number:]
        if isinstance(running, Training) and running.compared_with:
            shown.append(f"then up to {clock(running.experiment.benchmark.limit_s)} to measure the speedup")
        elif later and all(trial.title in self._durations for trial in later):
            rest = sum(mean(self._durations[trial.title]) for trial in later)
            shown += [f"all trials: {each}" for each in left(left_s + rest)]
        return shown

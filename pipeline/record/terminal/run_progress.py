"""Progress of a command from its events: which trial runs, its state, and how long all trials still take.

Bars, plain lines, the display of a notebook and ``pipeline show`` all draw this state.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import mean

from pipeline.protocol.events import AnyEvent, Finished, Metrics, RunOpened, TrialOpened
from pipeline.protocol.trial import Evaluation, Training, Trial
from pipeline.record.terminal.trial_progress import VALIDATION, TrialProgress, left
from pipeline.wording import clock, counted


class RunProgress:
    """State of a command, updated by each of its events.

    Args:
        trials: all trials that are measured, also those that a training is compared with; empty if only the events
            are known.
    """

    def __init__(self, trials: Sequence[Trial] = ()) -> None:
        self.opened: RunOpened | None = None
        """Last start of the command."""
        self.trial: TrialOpened | None = None
        """Last launch of a trial."""
        self.progress = TrialProgress()
        """State of this trial."""
        self.has_ended = False
        """True from the end of this trial until the next launch."""
        self._planned: Mapping[str, Trial] = {trial.name: trial for trial in trials}
        compared = chain.from_iterable(trial.compared_with for trial in trials if isinstance(trial, Training))
        self._compared = {trial.name for trial in compared}
        self._launches = [trial for trial in trials if trial.name not in self._compared]
        self._launched: list[tuple[str, int]] = []
        self._durations: defaultdict[str, list[float]] = defaultdict(list)
        self._evaluations: defaultdict[str, list[Metrics]] = defaultdict(list)

    def update(self, event: AnyEvent) -> None:
        """Take an event of the command or of one of its trials."""
        self.note_evaluation(event)
        match event:
            case RunOpened():
                self.opened = event
            case TrialOpened():
                self._open(event)
            case Finished():
                self.has_ended = True
                if self.trial is not None:
                    self._durations[self.trial.title].append(event.time - self.trial.time)
            case _ if self.trial is not None and event.trial == self.trial.trial:
                self.progress.update(event)

    def note_evaluation(self, event: AnyEvent) -> None:
        """Keep an event, also one of an earlier session, if it has validation metrics: they count for the best."""
        if isinstance(event, Metrics) and any(point.name.startswith(VALIDATION) for point in event.points):
            self._evaluations[event.trial].append(event)

    @property
    def is_launched(self) -> bool:
        """False for a trial that a training is compared with: the training's rank 0 runs it."""
        return self.trial is not None and self.trial.trial not in self._compared

    @property
    def place(self) -> tuple[int, int]:
        """Number of the trial, from 1, and of all launches, 0 if unknown; a trial keeps its number if it restarts."""
        key = (self.trial.trial, self.trial.repeat) if self.trial else None
        if self._launches:
            keys = [(trial.name, trial.repeat) for trial in self._launches]
            return (keys.index(key) + 1 if key in keys else 0), len(keys)
        total = self.opened.launches if self.opened else 0
        return (min(self._launched.index(key) + 1, total) if key else 0), total

    @property
    def label(self) -> str:
        """Title of the trial with its role in a run, or with its number in a benchmark if it was planned."""
        if self.trial is None:
            return ""
        if any(isinstance(trial, Training | Evaluation) for trial in self._planned.values()):
            return self.trial.title if self.trial.role == "main" else f"{self.trial.trial}: {self.trial.title}"
        number, total = self.place
        return f"[{number}/{total}] {self.trial.title}" if number else self.trial.title

    @property
    def waiting(self) -> str:
        """What the trial waits for until its first event."""
        trial = self._planned.get(self.trial.trial) if self.trial else None
        if self.trial is None or trial is None or trial.launcher == "inprocess":
            return "starting ..."
        count = int(self.trial.tags.get("world_size", trial.workers))  # an elastic trial may have fewer than planned
        return f"starting {counted(count, 'worker')} with {trial.launcher} ..."

    def outlook(self, left_s: float | None) -> list[str]:
        """Return the place among several trials, and how long the rest takes as far as that is known.

        Trials take as long as equal ones before; the speedup takes at most about `Measure.limit_s`.

        Args:
            left_s: remaining seconds of the running trial; None if unknown.
        """
        number, total = self.place
        shown = [f"trial {number} of {total}"] if total > 1 and number else []
        if left_s is None or not number or not self._launches:
            return shown
        running, later = self._launches[number - 1], self._launches[number:]
        if isinstance(running, Training) and running.compared_with:
            shown.append(f"then up to {clock(running.experiment.benchmark.limit_s)} to measure the speedup")
        elif later and all(trial.title in self._durations for trial in later):
            rest = sum(mean(self._durations[trial.title]) for trial in later)
            shown += [f"all trials: {each}" for each in left(left_s + rest)]
        return shown

    def _open(self, event: TrialOpened) -> None:
        self.trial, self.has_ended = event, False
        if (key := (event.trial, event.repeat)) not in self._launched:
            self._launched.append(key)
        self.progress = TrialProgress(
            directions=self.opened.directions if self.opened else {},
            batch=self._batch(event),
            earlier=self._evaluations[event.trial],
        )

    def _batch(self, event: TrialOpened) -> int | None:
        """Return the samples of a trial's global batch; None if unknown."""
        if trial := self._planned.get(event.trial):
            return trial.experiment.train.global_batch_size
        batch = self.opened.params.get("train.global_batch_size", "") if self.opened else ""
        return int(batch) if batch.isdecimal() else None

"""A sweep in the terminal: a line when a trial begins, when it is evaluated, and when it has ended."""

from pipeline.commands.invocation import Invocation
from pipeline.commands.sweep import sweep_report
from pipeline.commands.sweep.assignment import Suggestion
from pipeline.commands.sweep.planning import SweepPlan
from pipeline.commands.sweep.sampling import titled
from pipeline.recording.terminal import write


class SweepDisplay:
    """Tells how far a sweep is, and the tracking store the best value so far."""

    def __init__(self, plan: SweepPlan, invocation: Invocation) -> None:
        self._plan = plan
        self._invocation = invocation
        self._terminal = invocation.terminal
        self._ended = 0
        self._best: float | None = None
        self._over: set[int] = set()
        """Trials that had ended in an earlier session; nothing is new about them."""

    def tell(self, message: str) -> None:
        """Say something on a line of its own."""
        write(self._terminal.progress, message)

    def began(self, suggestion: Suggestion) -> None:
        """See `pipeline.commands.sweep.tuner.Watcher`."""
        found = sweep_report.trial(self._invocation.folder, suggestion, metric=self._plan.sweep.metric)
        if found.state in ("finished", "stopped early"):
            self._over.add(suggestion.number)
            return
        again = f", going on after epoch {found.epochs}" if found.epochs else ""
        self.tell(f"{titled(suggestion.number, suggestion.values)}{again}")

    def evaluated(self, suggestion: Suggestion, *, epoch: int, value: float) -> None:
        """See `pipeline.commands.sweep.tuner.Watcher`."""
        if suggestion.number not in self._over:
            self.tell(f"trial {suggestion.number}: epoch {epoch}, {self._plan.sweep.metric} {value:.4g}")

    def ended(self, suggestion: Suggestion) -> None:
        """See `pipeline.commands.sweep.tuner.Watcher`."""
        found = sweep_report.trial(self._invocation.folder, suggestion, metric=self._plan.sweep.metric)
        self._ended += 1
        before = " before" if suggestion.number in self._over else ""
        why = f": {found.message}" if found.state == "failed" else ""
        count = f"{self._ended} of {self._plan.sweep.total} have ended"
        state = "stopped early" if found.state == "running" else found.state  # it writes its checkpoint yet
        message = f"trial {suggestion.number}: {state}{before}{why}; {count}"
        write(self._terminal.warnings if found.state == "failed" else self._terminal.progress, message)
        if found.state == "finished" and found.value is not None:
            self._note(found.value)

    def _note(self, value: float) -> None:
        """The best value so far, by the number of trials that have ended."""
        metric, better = self._plan.sweep.metric, min if self._plan.direction == "min" else max
        self._best = value if self._best is None else better(self._best, value)
        self._invocation.log({metric: self._best}, step=self._ended, epoch=self._ended)

"""The other ranks of a run that ``torchrun`` started: workers only, whose driver is rank 0."""

import sys
from functools import partial

from pipeline.launchers.base import NoOutbox
from pipeline.planning.plan import Plan
from pipeline.protocol.events import AnyEvent, Heartbeat
from pipeline.protocol.trial import Trial
from pipeline.system.imports import undisturbed
from pipeline.system.signals import end_after, on_sigterm


class _Standing(NoOutbox):
    """Nobody listens to this rank, but it can be stopped, and it says for itself when it stands still."""

    def __init__(self) -> None:
        self.stop_asked = False
        self._has_begun = False
        self._has_told = False

    def event(self, event: AnyEvent) -> None:
        """Tell of a hang as soon as it is one: this rank will be ended when another has waited in vain."""
        if not isinstance(event, Heartbeat):
            return
        self._has_begun = event.step > 0
        if event.is_stuck and not self._has_told:
            self._has_told = True
            where = f"rank {event.rank.rank} on {event.rank.node}"
            sys.stderr.write(f"{where}: {event.stall}\nStack of rank {event.rank.rank}:\n{event.stack}")
            sys.stderr.flush()

    def ask_to_stop(self, trial: Trial) -> None:
        """``torchrun`` passes a SIGTERM on to all ranks; one that has asked is enough for all to stop together."""
        self.stop_asked = True
        is_worth_it = self._has_begun and not trial.is_measurement
        end_after(trial.experiment.parallel.grace_s if is_worth_it else 0.0)


def follow(plan: Plan) -> None:
    """Be one of the workers of a run whose driver is rank 0, in a process that ``torchrun`` started.

    Raises:
        Exception: this rank failed by it; ``torchrun`` shows what is printed.
        SystemExit: it was stopped, after a checkpoint if there was something to save.
    """
    with undisturbed():
        from pipeline.worker import main  # imports torch, which takes seconds

    for trial in plan.trials:
        if trial.workers > 1:
            outbox = _Standing()
            on_sigterm(partial(outbox.ask_to_stop, trial))
            end = partial(main.end_process, _quietly)
            try:
                main.run(trial, rank=main.rank_from_environment(), outbox=outbox, end=end)
            except main.WorkerFailed as error:
                if not outbox.stop_asked:
                    raise error.__cause__ or error from None
            if outbox.stop_asked:
                sys.exit(143)


def _quietly() -> None:
    """There is no connection to close."""

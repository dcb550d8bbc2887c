"""Ranks other than 0 of a run that ``torchrun`` started: workers without a driver, which is in rank 0."""

import sys
from functools import partial
from pathlib import Path

from pipeline.planning.plan import Plan
from pipeline.protocol.events import AnyEvent, Heartbeat
from pipeline.protocol.trial import Training, Trial
from pipeline.system.imports import undisturbed
from pipeline.system.signals import end_after, on_sigterm


class _DriverlessOutbox:
    """Outbox of a rank without a driver: handles stop requests and reports its own hangs."""

    def __init__(self) -> None:
        self.stop_asked = False
        self._has_begun = False
        self._has_told = False

    def event(self, event: AnyEvent) -> None:
        """Report a hang at once: this rank is ended as soon as another rank gives up waiting."""
        if not isinstance(event, Heartbeat):
            return
        self._has_begun = event.step > 0
        if event.is_stuck and not self._has_told:
            self._has_told = True
            where = f"rank {event.rank.rank} on {event.rank.node}"
            sys.stderr.write(f"{where}: {event.stall}\nStack of rank {event.rank.rank}:\n{event.stack}")
            sys.stderr.flush()

    def file(self, path: Path, name: str) -> None:
        """Send nothing: rank 0 sends all files."""

    def ask_to_stop(self, trial: Trial) -> None:
        """Stop at SIGTERM: ``torchrun`` passes it on to all ranks, which agree on a step to stop at."""
        self.stop_asked = True
        is_worth_it = self._has_begun and isinstance(trial, Training)
        end_after(trial.experiment.parallel.grace_s if is_worth_it else 0.0)


def follow(plan: Plan) -> None:
    """Run this process, which ``torchrun`` started, as one of the workers of rank 0's trials.

    Raises:
        Exception: the error of this rank; ``torchrun`` shows what is printed.
        SystemExit: SIGTERM, after a checkpoint if there was something to save.
    """
    with undisturbed():
        from pipeline.worker import main  # imports torch, which takes seconds

    for trial in plan.trials:
        if trial.workers > 1:
            outbox = _DriverlessOutbox()
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
    """Close nothing: there is no connection."""

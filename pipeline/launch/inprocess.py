"""Launcher for one worker in the driver's own process: nothing to start, and debuggers work."""

import socket
from contextlib import suppress

from pipeline import worker
from pipeline.experiment.schema import Parallel
from pipeline.launch import base
from pipeline.plan import resources
from pipeline.plan.resources import Resources
from pipeline.protocol.events import Outcome
from pipeline.protocol.trial import Rank, Trial


class Launcher(base.Launcher):
    """Calls the worker function directly."""

    many_processes = False

    @staticmethod
    def resources(parallel: Parallel) -> Resources:
        """Return the resources of this machine."""
        return resources.detect()

    def capacity(self, trial: Trial) -> int:
        """Return 1: this process."""
        return 1

    def launch(self, trial: Trial) -> Outcome:
        """Run the trial; see `pipeline.launch.base.Launcher`."""
        attempt = self.attempt(trial)
        with suppress(worker.WorkerFailed):  # it has been reported
            worker.run(attempt.trial, Rank(node=socket.gethostname()), attempt.outbox)
        return attempt.outcome()

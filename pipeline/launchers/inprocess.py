"""The trial in the driver's own process: the shortest way, and where a debugger works."""

import socket
from contextlib import suppress
from typing import Self

from pipeline.config.parallel import Parallel
from pipeline.launchers.base import DirectOutbox, Session
from pipeline.planning import resources
from pipeline.planning.resources import Resources
from pipeline.protocol.trial import Rank, Trial
from pipeline.worker import main


class Launcher:
    """Runs the worker function where it stands."""

    many_processes = False

    def __init__(self, session: Session) -> None:
        self.session = session

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing was started."""

    @staticmethod
    def resources(parallel: Parallel) -> Resources:
        """This machine."""
        return resources.detect()

    def capacity(self, trial: Trial) -> int:
        """This process."""
        return 1

    def launch(self, trial: Trial) -> None:
        """Run the trial; see `pipeline.launchers.base.Launcher`."""
        with suppress(main.WorkerFailed):  # it has been reported
            main.run(trial, rank=Rank(node=socket.gethostname()), outbox=DirectOutbox(self.session))

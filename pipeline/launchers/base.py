"""What a launcher is: who starts a trial's workers and carries their events back."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol, Self

from pipeline.config.parallel import Parallel
from pipeline.launchers._shutdown import StopRequest
from pipeline.planning.resources import Resources
from pipeline.protocol.channel.inbox import Receive, inside, not_kept
from pipeline.protocol.events import AnyEvent
from pipeline.protocol.trial import Trial


@dataclass(frozen=True, kw_only=True)
class Session:
    """What a launcher works with during one run."""

    folder: Path
    """The run's folder; files of workers go there."""
    receive: Receive
    """Called with each event, from any thread."""
    parallel: Parallel
    """Where the workers run."""
    streams: bool = False
    """Whether the launcher reads the data and sends it to the workers."""
    verbose: bool = False
    """Whether to let the launcher's and the workers' output through to the terminal."""
    stop: StopRequest = field(default_factory=StopRequest)
    """Asks the workers to end early."""
    resize: StopRequest = field(default_factory=StopRequest)
    """Asks the workers to end early because more of them can go on."""

    def log_folder(self, trial: Trial) -> Path:
        """Where the workers of a trial write what they print."""
        folder = self.folder / "logs" / trial.name
        folder.mkdir(parents=True, exist_ok=True)
        return folder


class DirectOutbox:
    """The way to the driver of a worker that lives in the same process."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def stop_asked(self) -> bool:
        """Whether the run's own process was asked to stop."""
        return self._session.stop.asked

    def event(self, event: AnyEvent) -> None:
        """Hand the event over."""
        self._session.receive(event)

    def file(self, path: Path, name: str) -> None:
        """Copy the file into the run's folder."""
        try:
            shutil.copyfile(path, inside(self._session.folder, name))
        except OSError as error:  # a full disk is no failure of the training
            self._session.receive(not_kept(name, error))


class NoOutbox:
    """For ranks whose driver hears everything from rank 0."""

    stop_asked = False

    def event(self, event: AnyEvent) -> None:
        """Nobody listens."""

    def file(self, path: Path, name: str) -> None:
        """Nobody listens."""


class WorkersLost(Exception):
    """Workers ended without a word, e.g. killed for want of memory. ``losses`` says how, by rank."""

    def __init__(self, losses: Mapping[int, str]) -> None:
        self.losses = dict(losses)
        super().__init__("; ".join(f"rank {rank}: {how}" for rank, how in sorted(self.losses.items())))


class Launcher(Protocol):
    """Launches trials one after the other, as a context manager that cleans up behind itself.

    The contract, held by tests/contract/test_launchers.py for every file in this folder: each trial's events arrive
    through ``session.receive`` before `launch` ends, a rank's own error is kept, no process is left behind.
    """

    many_processes: ClassVar[bool]
    """Whether it can run more than one worker."""

    session: Session

    def __init__(self, session: Session) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    @staticmethod
    def resources(parallel: Parallel) -> Resources:
        """Cores and GPUs that its workers can be placed on.

        Raises:
            ResourceError: they can't be reached.
        """
        ...

    def capacity(self, trial: Trial) -> int:
        """How many workers of a trial there is room for now, those that run counted; may be called from any thread."""
        ...

    def launch(self, trial: Trial) -> None:
        """Run a trial to its end, well or badly: a failed rank has reported its error as an event.

        Raises:
            WorkersLost: a worker ended without reporting, or is not heard any more because its node is cut off.
            ResourceError: the workers can't be placed.
        """
        ...

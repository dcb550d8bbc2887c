"""The interface of a launcher, which starts a trial's workers, and what all launchers share: events, hangs, stops."""

import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from pipeline.experiment.parallel import Parallel
from pipeline.launch._hang_detector import HangDetector
from pipeline.launch._shutdown import StopRequest
from pipeline.plan.resources import Resources, UnfitNode
from pipeline.protocol.channel.inbox import Inbox, Receive, inside, not_kept, replacing
from pipeline.protocol.channel.wire import Address
from pipeline.protocol.events import AnyEvent, Failed, Finished, FirstStep, Heartbeat, Phase
from pipeline.protocol.trial import Training, Trial
from pipeline.protocol.trial_outcome import Outcome

_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Session:
    """The run that a launcher works for."""

    folder: Path
    """The run's folder; files of workers go there."""
    receive: Receive
    """Takes each event; called from any thread."""
    parallel: Parallel
    """Placement of the workers."""
    unfit: Mapping[str, UnfitNode] = field(default_factory=dict)
    """Nodes of a cluster that were left out when the run was planned, by Ray's id."""
    verbose: bool = False
    """True if the output of the launcher and the workers goes to the terminal."""

    def log_folder(self, trial: Trial) -> Path:
        """Return the folder for the output of a trial's workers; make it if it is missing."""
        folder = self.folder / "logs" / trial.name
        folder.mkdir(parents=True, exist_ok=True)
        return folder


class DirectOutbox:
    """Outbox of a worker in the driver's own process."""

    def __init__(self, session: Session, *, is_stopping: Callable[[], bool] = lambda: False) -> None:
        self._session = session
        self._is_stopping = is_stopping

    @property
    def stop_asked(self) -> bool:
        """True if the run's own process was asked to stop."""
        return self._is_stopping()

    def event(self, event: AnyEvent) -> None:
        """Pass the event on."""
        self._session.receive(event)

    def file(self, path: Path, name: str) -> None:
        """Copy the file into the run's folder."""
        try:
            place = inside(self._session.folder, name)
            with replacing(place) as partial:
                shutil.copyfile(path, partial)
        except OSError as error:  # a full disk is no failure of the training
            self._session.receive(not_kept(name, error))


class Attempt:
    """One launch of a trial: forwards its workers' events to the run, and keeps what its outcome consists of.

    Workers in processes of their own send events and hang up while it listens, in any thread.
    """

    def __init__(self, trial: Trial, *, session: Session, stop: StopRequest, resize: StopRequest) -> None:
        self.nodes: dict[int, str] = {}
        """Nodes of the ranks that have come, by rank."""
        self.ended: set[int] = set()
        """Ranks that have ended in order, or have reported their failure."""
        self.lost: set[int] = set()
        """Ranks whose connection broke before they had ended."""
        self._trial = trial
        self._detector = HangDetector(trial, receive=self.receive)
        self._beside = {one.name for one in trial.compared_with} if isinstance(trial, Training) else set()
        self._session = session
        self._stop, self._resize = stop, resize
        self._opened_at = time.monotonic()
        self._time_to_first_step: float | None = None
        self._outcome = Outcome()
        self._lock = threading.Lock()
        own = replace(session, receive=self.receive)
        self.outbox = DirectOutbox(own, is_stopping=lambda: stop.asked)
        """Outbox for a worker in this process."""

    @property
    def silent(self) -> Mapping[int, str]:
        """Reasons for which silent ranks of other nodes count as lost, by rank."""
        return self._detector.lost

    def receive(self, event: AnyEvent) -> None:
        """Forward an event of a worker, from any thread; if it can't be recorded, the run stops.

        Events of trials that the training is compared with are kept for the outcome: the training ends after them.
        """
        if event.trial in self._beside:
            with self._lock:
                self._outcome = replace(self._outcome, beside=(*self._outcome.beside, event))
            return
        if isinstance(event, FirstStep):
            self._time_to_first_step = time.monotonic() - self._opened_at
        elif isinstance(event, Finished):
            event = event.model_copy(update={"time_to_first_step_s": self._time_to_first_step})
        with self._lock:
            self._outcome = self._outcome.after(event)
        try:
            self._session.receive(event)
        except OSError as error:  # without a journal the run stops, after a checkpoint
            self._stop.ask(error)

    @contextmanager
    def listening(self, host: str) -> Iterator[Address]:
        """Open an inbox on an address of this machine; yield where workers connect to it.

        Meanwhile hanging ranks are detected and stop requests are passed on to the workers.
        """
        inbox = Inbox(
            host=host,
            receive=self.receive_sent,
            folder=self._session.folder,
            hung_up=self.hung_up,
        )
        tell = inbox.ask_to_stop
        with self._detector.watching(), inbox, self._stop.telling(tell), self._resize.telling(tell):
            yield inbox.address

    def receive_sent(self, event: AnyEvent) -> None:
        """Take an event that a worker has sent: note which ranks are there, and find those that hang."""
        with self._lock:
            if isinstance(event, Heartbeat):
                self.nodes[event.rank.rank] = event.rank.node
            if isinstance(event, Failed) or (isinstance(event, Heartbeat) and event.phase is Phase.ENDED):
                self.ended.add(event.rank.rank)
        self._detector.receive(event)

    def hung_up(self, rank: int) -> None:
        """Note that a rank has disconnected."""
        with self._lock:
            if rank not in self.ended:
                self.lost.add(rank)

    def await_ends(self, ranks: Iterable[int], *, timeout_s: float) -> set[int]:
        """Wait until all of the ranks have ended, or one is lost; return the lost and, after a timeout, the missing."""
        wanted, deadline = set(ranks), time.monotonic() + timeout_s
        while (missing := wanted - self.ended) and not self.lost and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return set(self.lost) or missing

    def outcome(self, losses: Mapping[int, str] | None = None) -> Outcome:
        """Return the outcome; ``losses`` says how workers were lost, by rank."""
        reported = {failure.rank.rank for failure in self._outcome.failures}
        if losses:
            self._detector.report_stall_of(losses.keys() - reported)
        nodes, was_resized = dict(self.nodes), self._resize.asked
        return replace(self._outcome, losses=dict(losses or {}), nodes=nodes, was_resized=was_resized)


class Launcher(ABC):
    """Launches trials one after another; a context manager that leaves nothing behind.

    A launcher implements `resources`, `capacity` and `launch`. The contract, held by tests/contract/test_launchers.py
    for every file in this folder: each trial's events arrive through ``session.receive`` before `launch` ends, a rank's
    own error is kept, no process is left behind.
    """

    many_processes: ClassVar[bool] = True
    """True if it can run more than one worker."""

    departures: Callable[[], Mapping[str, Any]] | None = None
    """Returns the nodes that are about to go away, by id, in any thread; None if the launcher can't know."""

    replaces_workers: bool = True
    """True if it can start a trial's workers again after some were lost."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.stop = StopRequest()
        """Asks the workers of this and all later trials to save a checkpoint and end."""
        self.resize = StopRequest()
        """Asks the workers of the running trial to save a checkpoint and end because others are to continue: more of
        them, or on other nodes."""

        self.held = ExitStack()
        """Resources shared by all trials, released at the end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.held.close()

    @staticmethod
    @abstractmethod
    def resources(parallel: Parallel) -> Resources:
        """Return the cores and GPUs that workers can be placed on.

        Raises:
            ResourceError: they can't be reached.
        """

    def check_nodes(self, trial: Trial) -> None:  # noqa: B027 - most launchers have this machine only
        """Check the nodes that may get workers of a trial; called before its workers are counted or started.

        Raises:
            ResourceError: too few workers fit on the nodes that can have workers.
        """

    def request_nodes(self, trial: Trial, *, workers: int) -> None:  # noqa: B027 - most launchers have this machine only
        """Ask for nodes for a number of a trial's workers that have no room, if nodes can be added."""

    @abstractmethod
    def capacity(self, trial: Trial) -> int:
        """Return the number of a trial's workers that fit now, running ones included; called from any thread."""

    @abstractmethod
    def launch(self, trial: Trial) -> Outcome:
        """Run a trial to its end, within an `attempt`, and return what came of it, also if ranks failed or were lost.

        Raises:
            ResourceError: the workers can't be placed.
        """

    def attempt(self, trial: Trial) -> Attempt:
        """Begin an attempt at a trial: the first thing that `launch` does."""
        self.resize = StopRequest()
        return Attempt(trial, session=self.session, stop=self.stop, resize=self.resize)

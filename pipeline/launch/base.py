"""The interface of a launcher, which starts a trial's workers, and what all launchers share: events, hangs, stops."""

import logging
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self

from pipeline.errors import Terminated
from pipeline.experiment.schema import Experiment, Parallel
from pipeline.launch.hang import HangDetector
from pipeline.plan.resources import Resources
from pipeline.protocol.channel import Address, DirectOutbox, Inbox
from pipeline.protocol.events import AnyEvent, Failed, Finished, FirstStep, Heartbeat, Outcome, Phase
from pipeline.protocol.trial import Training, Trial
from pipeline.system import SAME_S, handle_signals

LOOPBACK = "127.0.0.1"
_log = logging.getLogger(__name__)


class StopRequest:
    """Request to a run's workers to save a checkpoint and end."""

    def __init__(self) -> None:
        self.asked = False
        self.asked_at = 0.0  # Time of the request, in seconds of `time.monotonic`
        self.why: BaseException = Terminated()  # Exception that ends the run

    def ask(self, why: BaseException | None = None) -> None:
        """Ask all workers, later ones included; only the first call counts. Safe in a signal handler."""
        if not self.asked:
            self.asked, self.asked_at, self.why = True, time.monotonic(), why or self.why


@contextmanager
def gracefully(stop: StopRequest, *, grace_s: float, is_worth_it: Callable[[], bool]) -> Iterator[None]:
    """Ask the workers to stop at SIGTERM; after a stop request, raise its reason however the block ended.

    If the workers haven't stopped after ``grace_s`` seconds, or at a second SIGTERM, the block ends at once; so it does
    at the first one if there is nothing worth a checkpoint.

    Raises:
        Terminated: SIGTERM.
        OSError: the run can't be recorded.
    """
    timers: list[threading.Timer] = []

    def handle(*_: object) -> None:
        if stop.asked and time.monotonic() - stop.asked_at < SAME_S:
            return
        if stop.asked or not is_worth_it():
            raise Terminated
        stop.ask()
        timers.append(threading.Timer(grace_s, os.kill, (os.getpid(), signal.SIGTERM)))
        timers[0].daemon = True
        timers[0].start()

    try:
        with handle_signals(handle, signal.SIGTERM):
            yield
    except Exception as error:
        if not stop.asked:
            raise
        _log.warning("failed while it was being stopped", exc_info=error)  # only the log has it
        raise stop.why from error
    finally:
        for timer in timers:
            timer.cancel()
    if stop.asked:
        raise stop.why


@dataclass(frozen=True, kw_only=True)
class Session:
    """The run that a launcher works for."""

    folder: Path  # The run's folder; files of workers go there
    receive: Callable[..., None]  # Takes each event, and its line if a worker has sent it; called from any thread
    parallel: Parallel  # Placement of the workers
    verbose: bool = False  # True if the output of the launcher and the workers goes to the terminal

    def log_folder(self, trial: Trial) -> Path:
        """Return the absolute folder for the output of a trial's workers; make it if it is missing."""
        folder = self.folder / "logs" / trial.name
        folder.mkdir(parents=True, exist_ok=True)
        return folder.resolve()


class Attempt:
    """Launch of a trial: forwards its workers' events to the run, and keeps what its outcome consists of."""

    def __init__(self, trial: Trial, *, session: Session, stop: StopRequest) -> None:
        self.trial = trial.model_copy(update={"folder": str(session.folder.resolve())})
        """The trial as the workers get it."""
        self.nodes: dict[int, str] = {}  # Nodes of the ranks that have come, by rank
        self.ended: set[int] = set()  # Ranks that have ended in order, or have reported their failure
        self.lost: set[int] = set()  # Ranks whose connection broke before they had ended
        self.outbox = DirectOutbox(session.folder, self.receive, is_stopping=lambda: stop.asked)
        """Outbox for a worker in this process."""
        self._detector = HangDetector(trial, receive=self.receive)
        self.silent: Mapping[int, str] = self._detector.lost
        """Reasons for which silent ranks of other nodes count as lost, by rank."""
        self._beside = {one.name for one in trial.compared_with} if isinstance(trial, Training) else set()
        self._session, self._stop = session, stop
        self._opened_at = time.monotonic()
        self._time_to_first_step: float | None = None
        self._outcome = Outcome()
        self._lock = threading.Lock()

    def receive(self, event: AnyEvent, line: bytes | None = None) -> None:
        """Forward an event, or keep it for the outcome; if it can't be recorded, the run stops after a checkpoint."""
        if event.trial in self._beside:
            with self._lock:
                self._outcome = replace(self._outcome, beside=(*self._outcome.beside, event))
            return
        if isinstance(event, FirstStep):
            self._time_to_first_step = time.monotonic() - self._opened_at
        elif isinstance(event, Finished):
            event, line = event.model_copy(update={"time_to_first_step_s": self._time_to_first_step}), None
        with self._lock:
            self._outcome = self._outcome.after(event)
        try:
            self._session.receive(event, *([] if line is None else [line]))  # the journal keeps a worker's own bytes
        except OSError as error:
            self._stop.ask(error)

    def receive_sent(self, event: AnyEvent, line: bytes | None = None) -> None:
        """Take an event of a worker in a process of its own: note which ranks are there, and find those that hang."""
        if isinstance(event, Heartbeat | Failed):
            rank = event.rank.rank
            with self._lock:
                self.nodes[rank] = event.rank.node
                if isinstance(event, Failed) or event.phase is Phase.ENDED:
                    self.ended.add(rank)
            self._detector.note(event)
            if isinstance(event, Heartbeat) and (rank > 0 or event.phase is Phase.ENDED):
                return  # those of rank 0 move the bar
        self.receive(event, line)

    def hung_up(self, rank: int) -> None:
        """Note that a rank has disconnected."""
        self._detector.forget(rank)
        with self._lock:
            if rank not in self.ended:
                self.lost.add(rank)

    @contextmanager
    def listening(self, host: str) -> Iterator[Address]:
        """Receive what workers send to the yielded address, find those that hang, and pass stop requests on."""
        inbox = Inbox(
            host=host, receive=self.receive_sent, hung_up=self.hung_up, is_stopping=lambda: self._stop.asked
        )  # fmt: skip
        with self._detector.watching(), inbox:
            yield inbox.address

    def outcome(self, losses: Mapping[int, str] | None = None) -> Outcome:
        """Return the outcome; ``losses`` says how workers were lost, by rank."""
        if losses:
            self._detector.report_stall_of(losses.keys() - {failure.rank.rank for failure in self._outcome.failures})
        return replace(self._outcome, losses=dict(losses or {}), nodes=dict(self.nodes))


class Launcher(ABC):
    """Launches trials one after another; a context manager that leaves nothing behind.

    A launcher implements `resources`, `capacity` and `launch`. The contract, held by
    tests/system/contract/test_launchers.py for every file in this folder: each trial's events arrive through
    ``session.receive`` before `launch` ends, a rank's own error is kept, no process is left behind.
    """

    many_processes: ClassVar[bool] = True  # True if it can run more than one worker

    replaces_workers: bool = True  # True if it can start a trial's workers again after some were lost

    def __init__(self, session: Session) -> None:
        self.session = session
        self.stop = StopRequest()  # Asks the workers of this and all later trials to save a checkpoint and end
        self.held = ExitStack()  # Resources shared by all trials, released at the end

    @classmethod
    @contextmanager
    def preparing(cls, experiment: Experiment, *, verbose: bool = False) -> Iterator[None]:
        """Start what takes long while the experiment is checked; at the end of the block, end what was not needed."""
        yield

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

    @abstractmethod
    def capacity(self, trial: Trial) -> int:
        """Return the number of a trial's workers that fit now."""

    @abstractmethod
    def launch(self, trial: Trial) -> Outcome:
        """Run a trial to its end, within an `attempt`, and return what came of it, also if ranks failed or were lost.

        Raises:
            ResourceError: the workers can't be placed.
        """

    def attempt(self, trial: Trial) -> Attempt:
        """Begin an attempt at a trial: the first thing that `launch` does."""
        return Attempt(trial, session=self.session, stop=self.stop)

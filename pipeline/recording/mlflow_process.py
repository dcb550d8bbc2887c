"""Process that writes a run to MLflow and to the trackers of ``tracking.loggers``, each in a thread.

MLflow's has a lower priority than training, and after it the usual one; the others' stay at the lower one.

It reads the run's journal while it is written. `pipeline.recording.mlflow` sends it lines on standard input: a
`WriterTask`, the run's `RunClosed`, which the journal lacks on a full disk, then `CLOSE`. It answers with lines of
`WriterReply` on standard output.
"""

import gc
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event as Flag
from threading import Thread
from time import monotonic
from typing import BinaryIO

from pipeline.config.values import Frozen, WithEnvironment
from pipeline.protocol.events import AnyEvent, RunClosed, RunOpened, event_from_json, is_reason_to_keep
from pipeline.recording.delivery import BATCH_POINTS, Delivery, persist, quiet, size
from pipeline.recording.journal import FILE_NAME, Feed
from pipeline.recording.outcome import TrackingOutcome
from pipeline.recording.store import create_store
from pipeline.recording.trackers import Attached, attach_also
from pipeline.system.process import TASKS

CLOSE = b"close\n"
"""Line that ends the task: the journal is complete."""
_BATCH_S = 1.0
_UPLOAD_PAUSE_S = 2.0
_TELL_S = 0.25
_NICE = 6
"""Niceness beside training; not more, since the run's page should be there soon after the first step.

On Linux each thread has its own. It can't be taken back without privileges, so at the run's end, for which the user
waits, another thread continues."""


class WriterTask(WithEnvironment):
    """Task of the process: the journal to read and the store to write to."""

    folder: Path
    """Folder of the run."""
    log: Path
    """File for the output of libraries."""
    uri: str
    """URI of the store with credentials; empty for the URI in the run's first event."""
    known: int
    """Number of events in the journal of a resumed run. They are sent again: some may not have been delivered, and a
    delivered event changes nothing."""
    adds: bool = False
    """True if the run has ended, and keeps its status meanwhile."""
    also: tuple[str, ...] = ()
    """Trackers beside MLflow, see ``tracking.loggers``."""


class WriterReply(Frozen):
    """Report of the process on its progress, or a warning."""

    warning: str = ""
    """Warning that an outage began or ended; the other fields are then unset."""
    waiting: str = ""
    """Amount that MLflow lacks, e.g. "12 events and 3 files" or "1 file: model (2.8 MB)"."""
    outcome: TrackingOutcome | None = None
    """Outcome of the delivery so far."""
    is_done: bool = False
    """True once MLflow has accepted or refused all events."""
    also: tuple[str, ...] = ()
    """Trackers beside MLflow that haven't ended."""


class Writer:
    """Sender of a feed's events to MLflow, until the feed ends.

    Args:
        task: the journal and the store.
        warn: called when an outage begins and when it ends.
    """

    def __init__(self, task: WriterTask, *, warn: Callable[[str], None]) -> None:
        self.feed = Feed(task.folder / FILE_NAME, known=task.known)
        self.closing = Flag()
        """Set with the feed's end; from then on an attempt is repeated only a few times."""
        self.done = Flag()
        self.end: AnyEvent | None = None
        """The end of the run, sent last unless the journal has it."""
        self._delivery = Delivery(folder=task.folder, warn=warn, uri=task.uri, adds=task.adds)
        self._batch = 0  # events being sent
        self._upload_at = 0.0
        self._has_ended = False  # without trouble
        self._uri, self._is_kept = task.uri, task.adds
        self._parts = self._deliver_all()

    def work(self, *, is_beside: bool = False) -> None:
        """Send all events and files, or as many as there are before the run ends if ``is_beside``; never raises.

        It continues where an earlier call in another thread has returned.
        """
        try:
            with quiet():
                for _ in self._parts:
                    if is_beside and self.closing.is_set():
                        return
        except BaseException as error:  # noqa: BLE001 - also SystemExit, of a user's file that hides a package
            with suppress(Exception):  # else nothing would report the end
                self._delivery.fail(error)
        self.done.set()

    def reply(self) -> WriterReply:
        """Report the progress."""
        is_done = self.done.is_set()
        events = self._batch + len(self.feed)
        ending = "the delivery ended early" if is_done else "the run stopped waiting"
        trouble = self._delivery.trouble or ("" if is_done and self._has_ended else ending)
        return WriterReply(
            waiting=self._delivery.waiting(events) or "final status",
            outcome=TrackingOutcome.of(self._delivery, trouble=trouble, waiting=events),
            is_done=is_done,
        )

    def _deliver_all(self) -> Iterator[None]:
        """Send everything, with a pause before each batch; give up if the store doesn't accept it after the end."""
        has_ended = False
        while (batch := self._next_batch()) is not None:
            self._batch = len(batch)
            yield
            if batch and not persist(partial(self._delivery.attempt, batch), ending=self.closing):
                return
            self._batch = 0
            has_ended = bool(batch) and isinstance(batch[-1], RunClosed)
            if monotonic() >= self._upload_at and not self._delivery.upload():
                self._upload_at = monotonic() + _UPLOAD_PAUSE_S  # metrics don't wait for files
        yield
        end = [] if has_ended or self.end is None or not self._is_kept else [self.end]
        if not end or persist(partial(self._delivery.attempt, end), ending=self.closing):
            self._has_ended = persist(self._delivery.upload, ending=self.closing)

    def _next_batch(self) -> list[AnyEvent] | None:
        """Collect events of about a second, at first those there are; empty if files are due first, None at the end."""
        if not self._is_kept:
            return self._until_first_step()
        batch: list[AnyEvent] = []
        points, deadline = 0, self._upload_at if self._delivery.run.uploads else None
        while points < BATCH_POINTS:
            try:
                event = self.feed.get(timeout_s=None if deadline is None else max(0.0, deadline - monotonic()))
            except TimeoutError:
                break
            if event is None:
                return batch or None
            if not batch:  # the run itself doesn't wait for more, so that its page is there early
                deadline = monotonic() + (_BATCH_S if self._delivery.run.run_id else 0.0)
            batch.append(event)
            points += size(event)
        return batch

    def _until_first_step(self) -> list[AnyEvent] | None:
        """Collect the events up to the first step; None if the run ends before, which leaves nothing in the store."""
        batch: list[AnyEvent] = []
        while (event := self.feed.get()) is not None:
            batch.append(event)
            if isinstance(event, RunOpened):
                with suppress(Exception):  # takes a second, while workers start; the delivery reports an error
                    create_store(self._uri or event.tracking_uri)
            if is_reason_to_keep(event):
                self._is_kept = True
                return batch
        return None


def main() -> None:
    """Write the run that standard input names, until it ends or the driver is killed."""
    importing = Thread(target=_import, args=(sys.argv[2:],), daemon=True)
    importing.start()
    line = sys.stdin.buffer.readline()
    if not line:
        return  # no run came
    importing.join()
    task = WriterTask.model_validate_json(line)
    task.enter()  # user code may have changed the environment since this process started
    replies = _private_stdout(task.log)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    def warn(message: str) -> None:
        _tell(replies, WriterReply(warning=message))

    writer = Writer(task, warn=warn)
    also = attach_also(task.also, task.folder, known=task.known, warn=warn, prepare=_step_back)
    Thread(target=_listen, args=(writer, also), daemon=True).start()
    Thread(target=_work, args=(writer,), daemon=True).start()
    known = ""
    while not all(done.wait(_TELL_S) for done in (writer.done, *(each.done for each in also))):
        reply = writer.reply()
        if reply.outcome and (writer.closing.is_set() or reply.outcome.run_id != known):
            known = reply.outcome.run_id
            waiting = tuple(each.name for each in also if not each.done.is_set())
            _tell(replies, reply.model_copy(update={"also": waiting}))
    _tell(replies, writer.reply())
    gc.freeze()  # the driver waits for this process, whose end would look through all of MLflow


def _import(modules: Iterable[str]) -> None:
    _step_back()
    with suppress(Exception), quiet():  # the writer reports it
        for name in modules:
            importlib.import_module(name)


def _work(writer: Writer) -> None:
    """Send everything: until the run ends from a thread that yields to training."""

    def beside() -> None:
        _step_back()
        writer.work(is_beside=True)

    thread = Thread(target=beside, daemon=True)
    thread.start()
    thread.join()
    _set_autogroup(0)
    writer.work()


def _listen(writer: Writer, also: Iterable[Attached]) -> None:
    for line in sys.stdin.buffer:
        if line == CLOSE:
            writer.closing.set()
            writer.feed.end()
            for tracker in also:
                tracker.end()
            return
        writer.end = event_from_json(line)
    # The driver was killed. The journal has the results; --resume or sync sends them.
    os._exit(1)


def _tell(replies: BinaryIO, reply: WriterReply) -> None:
    replies.write(reply.model_dump_json().encode() + b"\n")


def _private_stdout(log: Path) -> BinaryIO:
    """Return standard output for the replies, and redirect what libraries print to the run's log."""
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    with suppress(OSError), log.open("ab", buffering=0) as file:  # not on a full disk
        os.dup2(file.fileno(), 2)
    os.dup2(2, 1)
    return replies


def _step_back() -> None:
    """Lower this thread's priority below training's: nice and autogroup, because Linux may weigh whole sessions.

    Where only processes have a priority, it is kept: it couldn't be raised at the end of the run.
    """
    if TASKS.is_dir():
        os.nice(_NICE)
        _set_autogroup(_NICE)


def _set_autogroup(nice: int) -> None:
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(nice))

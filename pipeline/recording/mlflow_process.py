"""The process that writes a run to MLflow, beside the one that trains and at a lower priority.

It reads the run's journal as that grows. What `pipeline.recording.mlflow` tells it comes line by line on standard
input, once it has imported MLflow: a `WriterTask`, the run's `RunClosed`, which a full journal may lack, then `CLOSE`.
It answers with lines of `WriterReply`.
"""

import importlib
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event as Flag
from threading import Thread
from time import monotonic
from typing import BinaryIO

from pipeline.config.values import Frozen, WithEnvironment
from pipeline.protocol.events import AnyEvent, RunClosed, event_from_json
from pipeline.recording.delivery import BATCH_POINTS, Delivery, persist, quiet, size
from pipeline.recording.feed import Feed
from pipeline.recording.journal import FILE_NAME
from pipeline.recording.outcome import TrackingOutcome

CLOSE = b"close\n"
"""The run has ended, its journal has its last event."""
_BATCH_S = 1.0
_UPLOAD_PAUSE_S = 2.0
_TELL_S = 0.25
_NICE = 10


class WriterTask(WithEnvironment):
    """What to write, and where to."""

    folder: Path
    """Of the run."""
    log: Path
    """Where to write what nobody else wants to hear."""
    uri: str
    """Of the store, credentials included; empty for the one that the events name."""
    known: int
    """Events that a continued run has in its journal. They are sent first: some may not have arrived, and those that
    have change nothing."""


class WriterReply(Frozen):
    """What a run hears of its results."""

    warning: str = ""
    """Of trouble; once when it begins and once when it ends. Such a line says nothing else."""
    waiting: str = ""
    """What MLflow doesn't have yet, e.g. "12 events and 3 files"."""
    outcome: TrackingOutcome | None = None
    """What has become of the results by now."""
    is_done: bool = False
    """Whether MLflow has everything, or won't take it."""


class Writer:
    """Sends what comes from a feed until it ends.

    Args:
        order: what to write, and where to.
        warn: told of trouble.
    """

    def __init__(self, order: WriterTask, *, warn: Callable[[str], None]) -> None:
        self.feed = Feed(order.folder / FILE_NAME, known=order.known)
        self.closing = Flag()
        """Set with the feed's end; from then on nobody waits long for a store that is down."""
        self.done = Flag()
        self.end: AnyEvent | None = None
        """The end of the run, sent last unless the journal has it."""
        self._folder = order.folder
        self._delivery = Delivery(folder=order.folder, warn=warn, uri=order.uri)
        self._batch = 0  # events that are on their way
        self._upload_at = 0.0

    def work(self) -> None:
        """Send everything; never raises."""
        try:
            with quiet():
                if self._deliver_all():
                    persist(self._delivery.upload, ending=self.closing)
        except Exception as error:  # noqa: BLE001 - MLflow can't even be imported; training doesn't need it
            self._delivery.fail(error)
        finally:
            self.done.set()

    def said(self) -> WriterReply:
        """How far it is."""
        is_done = self.done.is_set()
        events, files = self._batch + len(self.feed), len(self._delivery.run.uploads)
        parts = [f"{events:,} events"] * bool(events) + [f"{files} files"] * bool(files)
        trouble = self._delivery.trouble or ("" if is_done else "the run didn't wait any longer")
        return WriterReply(
            waiting=" and ".join(parts) or "the last words",
            outcome=TrackingOutcome.of(self._delivery, folder=self._folder, trouble=trouble, waiting=events),
            is_done=is_done,
        )

    def _deliver_all(self) -> bool:
        """Send events until the run ends; False if the last ones can't be sent."""
        has_ended = False
        while (batch := self._next_batch()) is not None:
            self._batch = len(batch)
            if batch and not persist(partial(self._delivery.attempt, batch), ending=self.closing):
                return False
            self._batch = 0
            has_ended = bool(batch) and isinstance(batch[-1], RunClosed)
            if monotonic() >= self._upload_at and not self._delivery.upload():
                self._upload_at = monotonic() + _UPLOAD_PAUSE_S  # results don't wait for files
        return (
            has_ended or self.end is None or persist(partial(self._delivery.attempt, [self.end]), ending=self.closing)
        )

    def _next_batch(self) -> list[AnyEvent] | None:
        """Events of about a second, none if files are due first; None after the end."""
        batch: list[AnyEvent] = []
        points, deadline = 0, self._upload_at if self._delivery.run.uploads else None
        while points < BATCH_POINTS:
            try:
                event = self.feed.get(timeout_s=None if deadline is None else max(0.0, deadline - monotonic()))
            except TimeoutError:
                break
            if event is None:
                return batch or None
            if not batch:
                deadline = monotonic() + _BATCH_S
            batch.append(event)
            points += size(event)
        return batch


def main() -> None:
    """Write a run, as standard input says, until it has ended or the process that trains is no more."""
    _step_back()
    with suppress(Exception), quiet():  # whoever needs it says what is wrong with it
        for name in sys.argv[2:]:
            importlib.import_module(name)
    line = sys.stdin.buffer.readline()
    if not line:
        return  # there was nothing to write
    order = WriterTask.model_validate_json(line)
    order.enter()  # the user's own code may have changed it since this process was started
    answers = _private_stdout(order.log)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    writer = Writer(order, warn=lambda message: _tell(answers, WriterReply(warning=message)))
    Thread(target=_listen, args=(writer,), daemon=True).start()
    Thread(target=writer.work, daemon=True).start()
    known = ""
    while not writer.done.wait(_TELL_S):
        said = writer.said()
        if said.outcome and (writer.closing.is_set() or said.outcome.run_id != known):
            known = said.outcome.run_id
            _tell(answers, said)
    _tell(answers, writer.said())


def _listen(writer: Writer) -> None:
    for line in sys.stdin.buffer:
        if line == CLOSE:
            writer.closing.set()
            writer.feed.end()
            return
        writer.end = event_from_json(line)
    # The process that trains was killed. The journal has its results, and whoever resumes the run sends them.
    os._exit(1)


def _tell(answers: BinaryIO, said: WriterReply) -> None:
    answers.write(said.model_dump_json().encode() + b"\n")


def _private_stdout(log: Path) -> BinaryIO:
    """Where the answers go; what libraries print goes to the run's log."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    with suppress(OSError), log.open("ab", buffering=0) as file:  # not on a disk without room
        os.dup2(file.fileno(), 2)
    os.dup2(2, 1)
    return answers


def _step_back() -> None:
    """Let training go first where cores are few. Linux may weigh whole sessions, and this process is one."""
    os.nice(_NICE)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(_NICE))

"""The journal of a run: one event a line, appended and never changed. It is the truth; trackers are copies of it."""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from pipeline.errors import UsageError
from pipeline.events import AnyEvent, RunClosed, event_from_json, event_to_json

FILE_NAME = "events.jsonl"
"""Name of the journal in a run's folder."""


class Journal:
    """Appends events to a file. An appended event survives a killed driver, a closed journal a power failure.

    The file stays locked while it is open, so that nobody writes to it twice and readers know whether its run goes on.

    Raises:
        UsageError: another process writes to this journal.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise UsageError(
                f"{path}: this run is still going on in another process; wait for it, or stop it"
            ) from None
        _cut_torn_line(path)

    def append(self, event: AnyEvent) -> None:
        """Write one event to the operating system; to the disk too if it ends the run.

        Raises:
            OSError: the disk is full; what could not be written is kept and written before the next event.
        """
        self._file.write(event_to_json(event) + b"\n")
        self._file.flush()
        if isinstance(event, RunClosed):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Write everything to the disk and unlock; may be called twice."""
        if self._file.closed:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def read(path: Path) -> Iterator[AnyEvent]:
    """All events of a journal in order. A torn last line, left by a power failure, counts as not written.

    Raises:
        UsageError: no such journal, or a line other than the last is damaged.
    """
    if not path.is_file():
        raise UsageError(f"{path}: no such journal; name the folder of a run, e.g. runs/<run>")
    torn: int | None = None
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if torn is not None:
                raise UsageError(
                    f"{path}:{torn}: this line is damaged; remove it if the event on it can be done without"
                )
            event = _parsed(line)
            if event is None:
                torn = number
            else:
                yield event


def is_open(path: Path) -> bool:
    """Whether a running process writes to this journal."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _parsed(line: bytes) -> AnyEvent | None:
    try:
        return event_from_json(line) if line.endswith(b"\n") else None
    except ValidationError:
        return None


def _cut_torn_line(path: Path) -> None:
    """Without it, the first event appended to a torn line would be lost with it."""
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)

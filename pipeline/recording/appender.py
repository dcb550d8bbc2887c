"""Files that are only appended to, on a disk that may be full: what finds no room waits in memory."""

import errno
import io
import os
import threading
from pathlib import Path

LIMIT_BYTES = 2**28
"""What may wait in memory. Training that ends for want of memory would be worse than lines that are missing."""


class Appender:
    """Appends whole lines to a file, and never fails to.

    What can't be written waits, and is written in order and before anything else as soon as it can. A line of which
    only the beginning found room is completed then.

    Raises:
        OSError: the file can't be opened.
    """

    def __init__(self, path: Path) -> None:
        self.trouble = ""
        """Why the last attempt to write failed, and what that means; empty if it didn't."""
        self._lost = 0
        self._waiting = bytearray()
        self._file = path.open("ab", buffering=0)

    @property
    def missing(self) -> int:
        """Lines that aren't in the file."""
        return self._lost + self._waiting.count(b"\n")

    def append(self, line: bytes) -> None:
        """Write a line, with its end, to the operating system.

        Raises:
            ValueError: the file has been closed.
        """
        if len(self._waiting) + len(line) > LIMIT_BYTES:
            self._lost += 1
        else:
            self._waiting += line
        self._attempt()

    def sync(self) -> None:
        """Write everything to the disk."""
        self._attempt()
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            self.trouble = _reason(error)

    def close(self) -> None:
        """Write everything to the disk, as far as there is room; may be called twice."""
        if not self._file.closed:
            self.sync()
            self._file.close()

    def fileno(self) -> int:
        """The file's descriptor."""
        return self._file.fileno()

    def _attempt(self) -> None:
        if os.fstat(self.fileno()).st_nlink == 0:
            self._lost, self._waiting = self.missing, bytearray()
            self.trouble = "it was deleted; what comes now isn't in it"
            return
        try:
            while self._waiting:
                del self._waiting[: self._file.write(self._waiting)]
            self.trouble = ""
        except OSError as error:
            rest = "; memory is full, too: the rest is lost" if self._lost else "; what comes now waits in memory"
            self.trouble = _reason(error) + rest


class Log(io.TextIOBase):
    """A text file for consoles and log handlers, which may write from any thread and never see an error."""

    def __init__(self, path: Path) -> None:
        self._appender = Appender(path)
        self._lock = threading.Lock()

    @property
    def missing(self) -> int:
        """Lines that aren't in the file."""
        return self._appender.missing

    def write(self, text: str) -> int:
        """Append a text; what comes after the end is dropped."""
        with self._lock:
            if not self.closed:
                self._appender.append(text.encode(errors="replace"))
        return len(text)

    def writable(self) -> bool:
        """True."""
        return True

    def close(self) -> None:
        """Write what is left, as far as there is room."""
        with self._lock:
            self._appender.close()
        super().close()


def _reason(error: OSError) -> str:
    return "the disk is full" if error.errno in {errno.ENOSPC, errno.EDQUOT} else error.strerror or str(error)

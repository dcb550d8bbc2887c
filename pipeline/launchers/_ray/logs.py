"""What ranks print, in the run's folder wherever the rank is."""

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.protocol.events import Outbox
from pipeline.protocol.trial import Rank

_SEND_EVERY_S = 5.0
_MOST_BYTES = 2**20
"""Of what is sent again and again; a longer one comes when the rank ends."""


@contextmanager
def kept_output(folder: str | None, *, rank: Rank, outbox: Outbox) -> Iterator[None]:
    """Have what this process prints in ``folder``; None lets it through to Ray.

    A node that can't reach the folder, which the driver has made, collects it in one of its own and sends it: now and
    then, so that a killed rank's last words are there, and in the end.
    """
    if folder is None:
        yield
        return
    place = Path(folder)
    if place.is_dir() and os.access(place, os.W_OK):
        _redirect(place, rank=rank)
        yield
        return
    with tempfile.TemporaryDirectory(prefix="pipeline-logs-") as own:
        logs = _redirect(Path(own), rank=rank)
        with _sending(logs, to=f"{place.parent.name}/{place.name}", outbox=outbox):
            yield


def _redirect(folder: Path, *, rank: Rank) -> list[Path]:
    """Write standard output and standard error, of libraries in C as well, into files of a folder."""
    logs = []
    for stream, number, name in ((sys.stdout, 1, "stdout"), (sys.stderr, 2, "stderr")):
        stream.flush()
        path = folder / f"rank{rank.rank}-{name}.log"
        with path.open("ab") as file:
            os.dup2(file.fileno(), number)
        logs.append(path)
    return logs


@contextmanager
def _sending(logs: list[Path], *, to: str, outbox: Outbox) -> Iterator[None]:
    done = threading.Event()
    sizes = dict.fromkeys(logs, 0)

    def send(most: int | None = None) -> None:
        for path in logs:
            size = path.stat().st_size
            if size != sizes[path] and (most is None or size <= most):
                sizes[path] = size
                outbox.file(path, f"{to}/{path.name}")

    def now_and_then() -> None:
        while not done.wait(_SEND_EVERY_S):
            send(_MOST_BYTES)

    thread = threading.Thread(target=now_and_then, name="logs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        sys.stdout.flush()
        sys.stderr.flush()
        send()

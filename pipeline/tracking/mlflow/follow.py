"""Process that sends a live run to MLflow and the named loggers: ``pipeline sync`` that follows the run's journal.

`pipeline.tracking.mlflow.mlflow_subscriber` starts it and writes two lines to its standard input: a `FollowTask`, and
the run's end. What it prints is for the user: warnings, and the address of the run on a server. It keeps its outcome in
the run's folder. Its exit code is 0 if everything was delivered.
"""

import gc
import importlib
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event as Flag
from threading import Thread

from pipeline.protocol.events import RunClosed, event_from_json
from pipeline.tracking.mlflow.delivery import quiet
from pipeline.tracking.mlflow.follow_task import INCOMPLETE, UNKNOWN_END, FollowTask
from pipeline.tracking.mlflow.outcome import TrackingOutcome, link_of
from pipeline.tracking.mlflow.sender import Sender
from pipeline.tracking.mlflow.store import is_server

_PUBLISH_S = 0.25


def main() -> None:
    """Send the run that standard input names, until it ends or the driver is killed."""
    with suppress(Exception), quiet():  # the sender reports it
        for name in sys.argv[2:]:
            importlib.import_module(name)
    line = sys.stdin.buffer.readline()
    if not line:
        return  # no run came
    task = FollowTask.model_validate_json(line)
    task.enter()  # user code may have changed the environment since this process started
    say = _private_stdout(task.log)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    def opened() -> None:
        outcome = sender.outcome  # for `pipeline show` meanwhile, and if the driver is killed
        _keep(outcome.mark_unfinished(task.folder), task.folder)
        if is_server(task.uri):  # the UI of another store has to be started first
            say(link_of(task.uri, outcome))

    sender = Sender(task.folder, uri=task.uri, warn=say, adds=task.adds, loggers=task.loggers, opened=opened)
    is_done = Flag()
    publisher = Thread(target=_publish, args=(sender, task.folder, is_done), daemon=True)
    publisher.start()
    sender.send()
    is_done.set()
    if sender.is_ending.is_set():
        publisher.join()
    _keep(sender.outcome, task.folder)
    gc.freeze()  # the driver waits for this process, whose end would look through all of MLflow
    sys.exit(0 if sender.outcome.delivered else INCOMPLETE)


def _publish(sender: Sender, folder: Path, is_done: Flag) -> None:
    """Wait for the end of the run; from then on keep the outcome up to date, since the driver may stop waiting."""
    line = sys.stdin.buffer.readline()
    if not line:
        # The driver was killed. The journal has the results; --resume or sync sends them.
        os._exit(1)
    event = None if line == UNKNOWN_END else event_from_json(line)
    sender.end(event if isinstance(event, RunClosed) else None)
    while not is_done.wait(_PUBLISH_S):
        _keep(sender.outcome, folder)


def _keep(outcome: TrackingOutcome, folder: Path) -> None:
    with suppress(OSError):  # a full disk or a deleted folder: the driver reports it
        outcome.keep(folder)


def _private_stdout(log: Path) -> Callable[[str], None]:
    """Return a function that prints a line for the driver; redirect what libraries print to the run's log."""
    stdout = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    with suppress(OSError), log.open("ab", buffering=0) as file:  # not on a full disk
        os.dup2(file.fileno(), 2)
    os.dup2(2, 1)

    def say(message: str) -> None:
        stdout.write(" ".join(message.splitlines()) + "\n")

    return say

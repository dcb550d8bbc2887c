"""The function that Ray runs in each worker process, with the rank's output kept in the run's folder.

The driver loads this module before it starts workers: an import at the top would be paid for there, for nothing.
"""

import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import ray.train

from pipeline.protocol.channel.outbox import ChannelOutbox
from pipeline.protocol.channel.wire import Address
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import trial_from_json
from pipeline.system.background import in_background

_SEND_EVERY_S = 5.0


def work(config: dict[str, Any]) -> None:
    """Run one rank of a trial in the process that Ray Train gave it."""
    from pipeline.launch.cluster.code import Code
    from pipeline.system.leftovers import Leftovers
    from pipeline.worker import main

    leftovers = Leftovers()
    trial = trial_from_json(config["trial"])
    context = ray.train.get_context()
    rank = Rank(
        rank=context.get_world_rank(),
        local_rank=context.get_local_rank(),
        world_size=context.get_world_size(),
        local_world_size=context.get_local_world_size(),
        node=os.uname().nodename,
    )
    Code.model_validate_json(config["code"]).enter()
    with (
        ChannelOutbox(Address.model_validate_json(config["channel"])) as outbox,
        redirect_output(config["logs"], rank=rank, outbox=outbox),
    ):
        try:
            main.run(trial, rank=rank, outbox=outbox, end=partial(main.end_process, outbox.close))
            leftovers.end(main.warning_of(rank, trial=trial, outbox=outbox), run_exit_functions=False)
        except main.WorkerFailed:
            main.log_traceback()
            raise main.WorkerFailed from None  # Ray writes the cause as well, with values of the environment


@contextmanager
def redirect_output(folder: str | None, *, rank: Rank, outbox: ChannelOutbox) -> Iterator[None]:
    """Redirect this process's output to files in ``folder``; None passes it on to Ray.

    A node that can't write to the driver's folder collects the output in temporary files. Every few seconds, and at
    the end, it sends what was added, so that little is missing when the rank is killed.
    """
    if folder is None:
        yield
        return
    place = Path(folder)
    if place.is_dir() and os.access(place, os.W_OK):
        _redirect(place, rank=rank)
        yield
        return
    with ExitStack() as files:
        with tempfile.TemporaryDirectory(prefix="pipeline-logs-", ignore_cleanup_errors=True) as own:
            logs = {
                f"{place.parent.name}/{place.name}/{path.name}": files.enter_context(path.open("rb"))
                for path in _redirect(Path(own), rank=rank)
            }
        # The folder is gone, the open files are not: a killed rank leaves nothing on the node's disk.
        with _sending(logs, outbox=outbox):
            yield


def _redirect(folder: Path, *, rank: Rank) -> list[Path]:
    """Redirect standard output and standard error, those of C libraries included, to files in a folder."""
    logs = []
    for stream, number, name in ((sys.stdout, 1, "stdout"), (sys.stderr, 2, "stderr")):
        stream.flush()
        path = folder / f"rank{rank.rank}-{name}.log"
        with path.open("ab") as file:
            os.dup2(file.fileno(), number)
        logs.append(path)
    return logs


@contextmanager
def _sending(logs: Mapping[str, BinaryIO], *, outbox: ChannelOutbox) -> Iterator[None]:
    """Send what is added to open files, given by their names in the run's folder, while the block runs."""

    def send() -> None:
        for name, file in logs.items():
            outbox.append(file, name)

    def send_repeatedly(done: threading.Event) -> None:
        while not done.wait(_SEND_EVERY_S):
            send()

    try:
        with in_background(send_repeatedly, name="logs"):
            yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        send()

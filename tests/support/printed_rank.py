"""``python -m printed_rank TRIAL``: one rank of a trial, by torchrun's variables, that prints its events as JSON."""

import os
import socket
import sys
from pathlib import Path

from pipeline import worker
from pipeline.protocol.channel import DirectOutbox
from pipeline.protocol.events import AnyEvent, Heartbeat, event_to_json
from pipeline.protocol.trial import Rank, trial_from_json


def show(event: AnyEvent) -> None:
    if not isinstance(event, Heartbeat):
        sys.stdout.write(event_to_json(event).decode() + "\n")


class Outbox(DirectOutbox):
    def file(self, path: Path, name: str) -> None:
        """Keep nothing."""


if __name__ == "__main__":
    names = ("rank", "world_size", "local_world_size")
    rank = Rank(**{name: int(os.environ[name.upper()]) for name in names}, node=socket.gethostname())
    worker.run(trial_from_json(Path(sys.argv[1]).read_text()), rank, Outbox(Path(), show))

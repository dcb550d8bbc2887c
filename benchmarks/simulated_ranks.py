"""A part of the simulated ranks of `driver_scale`: python simulated_ranks.py CHANNEL RANKS EVENTS FIRST STRIDE.

Each rank has its own connection. It says what a rank says, but computes nothing.
"""

import os
import sys
import threading
import time
from pathlib import Path

import psutil

from pipeline.protocol.channel.outbox import ChannelOutbox
from pipeline.protocol.channel.wire import Address
from pipeline.protocol.events import Heartbeat, Metrics, Phase, Point
from pipeline.protocol.rank import Rank

POINTS_PER_EVENT = 25
"""About what rank 0 of a training reports after ten steps."""
_WAITING = 20
"""Events that a rank may have waiting: the driver's pace is measured, not the senders' memory."""
_NAMES = ("loss", "learning_rate", "gradient_norm", "samples_per_second", "step_ms")


def main() -> None:
    """Connect all ranks of this process, send everything, hang up."""
    path, ranks, events, first, stride = Path(sys.argv[1]), *map(int, sys.argv[2:6])
    address = Address.model_validate_json(path.read_text())
    threading.stack_size(2**18)  # two threads for each rank
    outboxes = {rank: ChannelOutbox(address) for rank in range(first, ranks, stride)}
    done = threading.Event()
    pulse = threading.Thread(target=_beat, args=(outboxes, ranks, done))
    pulse.start()
    for index in range(events):
        for rank, outbox in outboxes.items():
            while outbox._queue.qsize() > _WAITING:
                time.sleep(0.01)
            outbox.event(_metrics(rank, index))
    done.set()
    pulse.join()
    for rank, outbox in outboxes.items():
        outbox.event(_heartbeat(rank, ranks, Phase.ENDED))
    for outbox in outboxes.values():
        outbox.close()


def _metrics(rank: int, index: int) -> Metrics:
    steps = POINTS_PER_EVENT // len(_NAMES)
    first = index * steps + 1
    points = [
        Point(f"rank_{rank}/{name}", step, step / (rank + 1)) for name in _NAMES for step in range(first, first + steps)
    ]
    return Metrics(time=time.time(), step=first + steps - 1, epoch=1, points=tuple(points))


def _beat(outboxes: dict[int, ChannelOutbox], ranks: int, done: threading.Event) -> None:
    while not done.wait(1.0):
        for rank, outbox in outboxes.items():
            outbox.event(_heartbeat(rank, ranks, Phase.FORWARD))


def _heartbeat(rank: int, ranks: int, phase: Phase) -> Heartbeat:
    return Heartbeat(
        time=time.time(),
        rank=Rank(rank=rank, local_rank=rank, world_size=ranks, local_world_size=ranks),
        pid=os.getpid(),
        process_started=_STARTED,
        step=1,
        phase=phase,
        idle_s=0.0,
        stack='  File "train.py", line 1, in main\n' * 8,
    )


_STARTED = psutil.Process().create_time()

if __name__ == "__main__":
    main()

"""What Ray runs in each worker process.

Ray's controller loads this module, too, before it starts the workers: whatever it imported at the top would be loaded
there first, for nothing, and then by the workers.
"""

import os
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray.train

from pipeline.channel import Address, ChannelOutbox
from pipeline.contract import Rank, Trial


def work(config: dict[str, Any]) -> None:
    """Be one rank of a trial, in the process that Ray Train gave it."""
    from pipeline import worker
    from pipeline.training.watch import end_process

    trial = Trial.model_validate_json(config["trial"])
    context = ray.train.get_context()
    rank = Rank(
        rank=context.get_world_rank(),
        local_rank=context.get_local_rank(),
        world_size=context.get_world_size(),
        local_world_size=context.get_local_world_size(),
        node=os.uname().nodename,
    )
    if config["logs"]:
        _redirect_output(Path(config["logs"]), rank=rank)
    with ChannelOutbox(Address.model_validate_json(config["channel"])) as outbox:
        worker.run(trial, rank=rank, outbox=outbox, end=partial(end_process, outbox.close))


def _redirect_output(folder: Path, *, rank: Rank) -> None:
    """Keep what this rank prints in the run's folder, where the node can reach it; else Ray's own logs have it."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        for stream, name in ((sys.stdout, "stdout"), (sys.stderr, "stderr")):
            stream.flush()
            with (folder / f"rank{rank.rank}-{name}.log").open("ab") as file:
                os.dup2(file.fileno(), 1 if name == "stdout" else 2)

"""What Ray runs in each worker process.

The driver loads this module, too, before it has workers started: whatever it imported at the top would be loaded there
first, for nothing, and then by the workers.
"""

import os
from functools import partial
from typing import Any

import ray.train

from pipeline.protocol.channel.outbox import ChannelOutbox
from pipeline.protocol.channel.wire import Address
from pipeline.protocol.trial import Rank, Trial


def work(config: dict[str, Any]) -> None:
    """Be one rank of a trial, in the process that Ray Train gave it."""
    from pipeline.cluster.code import Code
    from pipeline.launchers._ray.logs import kept_output
    from pipeline.worker import main

    if config["stream"] is not None:
        from pipeline.launchers._ray.ingest import Facts
        from pipeline.launchers._ray.rows import received
    trial = Trial.model_validate_json(config["trial"])
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
        kept_output(config["logs"], rank=rank, outbox=outbox),
    ):
        streams = received(Facts.model_validate_json(config["stream"])) if config["stream"] is not None else None
        main.run(trial, rank=rank, outbox=outbox, end=partial(main.end_process, outbox.close), streams=streams)

"""The function that Ray runs in each worker process, with the rank's output kept in the run's folder.

The driver loads this module before it starts workers: an import at the top would be paid for there, for nothing.
"""

import os
from functools import partial
from pathlib import Path
from typing import Any

import ray.train

from pipeline.protocol.channel import Address, ChannelOutbox
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import trial_from_json


def work(config: dict[str, Any]) -> None:
    """Run one rank of a trial in the process that Ray Train gave it."""
    from pipeline import worker
    from pipeline.launch.cluster.code import Code
    from pipeline.system.leftovers import Leftovers

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
    if config["logs"] and Path(config["logs"]).is_dir():
        worker.redirect_output(Path(config["logs"]), rank)
    with ChannelOutbox(Address.parse(config["channel"]), rank=rank.rank, folder=Path(trial.folder)) as outbox:
        try:
            worker.run(trial, rank, outbox, end=partial(worker.end_process, outbox.close))
            leftovers.end(worker.warning_of(rank, trial=trial, outbox=outbox), run_exit_functions=False)
        except worker.WorkerFailed:
            worker.log_traceback()
            raise worker.WorkerFailed from None  # Ray writes the cause as well, with values of the environment

"""A job's output while it is written, across interruptions of the connection."""

import asyncio
import time
from collections.abc import Callable

import aiohttp

from pipeline.commands.submit.jobs import Job, Jobs
from pipeline.errors import ResourceError

_PATIENCE_S = 60.0
"""Longest time without a cluster before it is given up."""
_RETRY_S = 2.0


def follow(jobs: Jobs, identity: str, *, show: Callable[[str], None]) -> Job:
    """Show what a job prints, from its beginning, until it ends; returns how it ended.

    Raises:
        UsageError: there is no such job.
        ResourceError: the cluster can't be reached any more.
    """
    seen = 0
    answered = time.monotonic()
    while True:
        try:
            if (job := jobs.job(identity)).has_ended:
                show(jobs.logs(identity)[seen:])
                return job
            answered = time.monotonic()
            seen = asyncio.run(_tail(jobs, identity, seen=seen, show=show))
        except (ResourceError, _Lost) as error:
            seen = error.seen if isinstance(error, _Lost) else seen
            if time.monotonic() - answered > _PATIENCE_S:
                raise ResourceError(
                    f"lost sight of {identity} on {jobs.url}, where it may still be going on"
                ) from error
            time.sleep(_RETRY_S)


class _Lost(Exception):
    """The connection broke after so many characters."""

    def __init__(self, seen: int) -> None:
        self.seen = seen
        super().__init__(seen)


async def _tail(jobs: Jobs, identity: str, *, seen: int, show: Callable[[str], None]) -> int:
    """Show what follows the first ``seen`` characters; returns how many there were."""
    come = 0
    try:
        async for text in jobs.client.tail_job_logs(identity):
            fresh = text[max(0, seen - come) :]
            come += len(text)
            if fresh:
                show(fresh)
    except (aiohttp.ClientError, RuntimeError, OSError) as error:
        raise _Lost(max(seen, come)) from error
    return max(seen, come)

"""Following a job's output, with reconnects when the connection breaks."""

import asyncio
import time
from collections.abc import Callable

import aiohttp

from pipeline.commands.submit.jobs import Job, Jobs
from pipeline.errors import ResourceError

_PATIENCE_S = 60.0
"""Seconds without an answer from the cluster before following ends with an error."""
_RETRY_S = 2.0


def follow(jobs: Jobs, identity: str, *, show: Callable[[str], None]) -> Job:
    """Show a job's output from its beginning until the job ends; return the ended job.

    Raises:
        UsageError: there is no such job.
        ResourceError: the cluster has not answered for a minute.
    """
    seen = 0
    answered = time.monotonic()
    while True:
        lost: Exception | None = None
        try:
            if (job := jobs.job(identity)).has_ended:
                show(jobs.logs(identity)[seen:])
                return job
            answered = time.monotonic()
            seen, lost = asyncio.run(_tail(jobs, identity, seen=seen, show=show))
        except ResourceError as error:
            lost = error
        if lost is not None:
            if time.monotonic() - answered > _PATIENCE_S:
                raise ResourceError(
                    f"lost the connection to {jobs.url}. {identity} may still be running there."
                ) from lost
            time.sleep(_RETRY_S)


async def _tail(jobs: Jobs, identity: str, *, seen: int, show: Callable[[str], None]) -> tuple[int, Exception | None]:
    """Show the output after the first ``seen`` characters.

    Returns:
        Number of characters received, and the error if the connection broke.
    """
    received = 0
    try:
        async for text in jobs.client.tail_job_logs(identity):
            fresh = text[max(0, seen - received) :]
            received += len(text)
            if fresh:
                show(fresh)
    except (aiohttp.ClientError, RuntimeError, OSError) as error:
        return max(seen, received), error
    return max(seen, received), None

"""Which rank is to blame, when one fails and takes the others with it."""

from collections.abc import Mapping, Sequence

from pipeline.errors import ExperimentError, PipelineError, TrainingError
from pipeline.events import Failed

_IN_VAIN = ("Timed out waiting", "Watchdog caught collective operation timeout")
"""What gloo and NCCL say when another rank hasn't come in ``parallel.timeout_s``."""

_COLLATERAL = (
    *_IN_VAIN,
    "DistBackendError",
    "DistNetworkError",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
)
"""What ranks say when another one has gone."""


def cause(failures: Sequence[Failed], losses: Mapping[int, str], *, nodes: Sequence[str] = ()) -> PipelineError:
    """The error to show for a failed trial.

    Args:
        failures: what ranks reported, in the order of arrival.
        losses: how workers ended, by rank, as the launcher saw it; those that reported are there, too.
        nodes: the node of each rank, if known; told where there are several.
    """
    first = next((failure for failure in failures if not _is_collateral(failure)), None)
    silent = {rank: how for rank, how in losses.items() if rank not in {failure.rank.rank for failure in failures}}
    if first is None and silent:
        places = {rank: f" on {node}" for rank, node in enumerate(nodes) if len(set(nodes)) > 1}
        lines = (f"rank {rank}{places.get(rank, '')} ended without a word: {how}" for rank, how in silent.items())
        return TrainingError("\n".join(lines))
    if first is None:
        first = next(iter(failures), None)
    if first is None:
        return TrainingError("the workers ended without a result; their logs are in the run's folder")
    if first.problems:
        return ExperimentError(first.problems)
    where = f"rank {first.rank.rank} on {first.rank.node}: " if first.rank.world_size > 1 else ""
    return TrainingError(where + first.error, first.traceback)


def only_lost_workers(failures: Sequence[Failed], losses: Mapping[int, str]) -> bool:
    """Whether no rank has failed by itself: workers ended without a word, and the others noticed."""
    return bool(losses) and all(_is_collateral(failure) for failure in failures)


def waited_in_vain(failure: Failed) -> bool:
    """Whether a rank gave up waiting for another one, which may hang."""
    return any(sign in failure.error for sign in _IN_VAIN)


def _is_collateral(failure: Failed) -> bool:
    return any(sign in failure.error for sign in _COLLATERAL)

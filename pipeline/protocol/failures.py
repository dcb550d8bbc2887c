"""Which rank is to blame, when one fails and takes the others with it."""

from collections.abc import Mapping, Sequence

from pipeline.errors import ExperimentError, PipelineError, TrainingError
from pipeline.protocol.events import Failed


def cause(failures: Sequence[Failed], losses: Mapping[int, str], *, nodes: Sequence[str] = ()) -> PipelineError:
    """The error to show for a failed trial.

    Args:
        failures: what ranks reported, in the order of arrival.
        losses: how workers ended, by rank, as the launcher saw it; those that reported are there, too.
        nodes: the node of each rank, if known; told where there are several.
    """
    first = next((failure for failure in failures if failure.origin == "rank"), None)
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
    return bool(losses) and all(failure.origin != "rank" for failure in failures)

"""Outcome of a launched trial: its result, or the rank that failed first."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pipeline.errors import ExperimentError, NoMemoryError, PipelineError, TrainingError
from pipeline.protocol.events import AnyEvent, Evaluated, Failed, Finished, Started, Trained
from pipeline.wording import listed


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result, failures and lost workers of one launch of a trial."""

    started: Started | None = None
    trained: Trained | None = None
    finished: Finished | None = None
    evaluated: Evaluated | None = None  # Result of the evaluation of a checkpoint, in place of ``finished``
    failures: tuple[Failed, ...] = ()  # Failures that ranks reported, in the order of their arrival
    losses: Mapping[int, str] = field(default_factory=dict)
    """Reasons for which the launcher lost workers, by rank; some of them may have reported a failure."""
    nodes: Mapping[int, str] = field(default_factory=dict)  # Nodes of the ranks that had started, by rank
    beside: tuple[AnyEvent, ...] = ()
    """Events of the trials that were measured in turn with the training, in their order."""

    def after(self, event: AnyEvent) -> "Outcome":
        """Return the outcome with what an event of a worker adds to it."""
        match event:
            case Started():
                return replace(self, started=event)
            case Trained():
                return replace(self, trained=event)
            case Finished():
                return replace(self, finished=event)
            case Evaluated():
                return replace(self, evaluated=event)
            case Failed():
                return replace(self, failures=(*self.failures, event))
        return self

    @property
    def has_ended(self) -> bool:
        """True if rank 0 has sent its result."""
        return self.finished is not None or self.evaluated is not None

    @property
    def has_failed(self) -> bool:
        """True if a rank has failed or a worker was lost."""
        return bool(self.failures or self.losses)

    @property
    def has_only_lost_workers(self) -> bool:
        """True if workers ended without reporting, and the other ranks failed only because of that."""
        return bool(self.losses) and all(failure.origin != "rank" for failure in self.failures)

    @property
    def is_experiment_wrong(self) -> bool:
        """True if a rank has found problems in the experiment file."""
        return any(failure.problems for failure in self.failures)

    @property
    def error(self) -> PipelineError:
        """The error to show for a failed trial: that of the first rank that failed by itself."""
        first = next((failure for failure in self.failures if failure.origin == "rank"), None)
        if first is None and (unreported := self._unreported()):
            return TrainingError(unreported)
        if first is None:
            first = next(iter(self.failures), None)
        if first is None:
            return TrainingError("the workers ended without a result; their logs are in the run's folder")
        if first.problems:
            return ExperimentError(first.problems)
        where = f"rank {first.rank.rank} on {first.rank.node}: " if first.rank.world_size > 1 else ""
        kind = NoMemoryError if first.is_out_of_memory else TrainingError
        return kind(where + first.error, first.traceback)

    def _unreported(self) -> str:
        """Name the ranks that ended without reporting a failure, and their nodes if there are several."""
        reported = {failure.rank.rank for failure in self.failures}
        has_several_nodes = len(set(self.nodes.values())) > 1
        places = {rank: f" on {node}" for rank, node in self.nodes.items() if has_several_nodes}
        together: dict[str, list[str]] = {}
        for rank, how in self.losses.items():
            if rank not in reported:
                together.setdefault(how, []).append(f"rank {rank}{places.get(rank, '')}")
        return "; ".join(f"{listed(ranks)} exited without reporting an error: {how}" for how, ranks in together.items())

"""Rank: the place of a process among the workers of a trial."""

from pipeline.experiment.values import Frozen


class Rank(Frozen):
    """Position of a process among the workers of a trial."""

    rank: int = 0
    local_rank: int = 0  # Index among the workers of the same node
    world_size: int = 1
    local_world_size: int = 1  # Workers on the same node
    node: str = "localhost"  # Host name, as it appears in errors and system metrics
    gpu: int | None = None  # Index of its first GPU among the GPUs that it sees; None: its position on the node decides

    @property
    def is_first(self) -> bool:
        """True for rank 0, which reports for all ranks."""
        return self.rank == 0

    @property
    def place(self) -> str:
        """Rank in words, with its node if there are several, e.g. "rank 137 on node17"."""
        return f"rank {self.rank}" + (f" on {self.node}" if self.local_world_size < self.world_size else "")

    @property
    def variables(self) -> dict[str, str]:
        """The variables in which torchrun tells a process its rank; user code may read them."""
        return {name.upper(): str(value) for name, value in self if name.endswith(("rank", "world_size"))}


class Job(Frozen):
    """Work of a waiting process, as a line on its standard input."""

    trial: str  # Path of the trial's JSON
    channel: str  # Address of the driver
    store: str  # File in which the ranks meet
    rank: Rank
    output: str  # Folder for the rank's output; empty: it goes where the driver's goes

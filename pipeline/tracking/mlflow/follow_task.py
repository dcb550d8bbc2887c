"""Messages between a run's driver and the process that follows its journal, see `pipeline.tracking.mlflow.follow`.

The driver imports no more than this of what the process does.
"""

from pathlib import Path

from pipeline.experiment.values import WithEnvironment

UNKNOWN_END = b"\n"
"""Second line if no end of the run is known."""
INCOMPLETE = 3
"""Exit code if something was not delivered."""


class FollowTask(WithEnvironment):
    """Task of the process: the journal to read and the places to send it to.

    It isn't in the arguments of the process, since credentials may be in the URI and the environment.
    """

    folder: Path
    """Folder of the run."""
    log: Path
    """File for the output of libraries."""
    uri: str
    """URI of the store with credentials; empty for the URI in the run's first event."""
    adds: bool = False
    """True if the run has ended, and keeps its status meanwhile."""
    loggers: tuple[str, ...] = ()
    """Loggers in addition to MLflow, see ``tracking.loggers``."""

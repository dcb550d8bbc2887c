"""End of a run, the argument of the function that ``tracking.on_end`` names."""

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.protocol.labels import Status


@dataclass(frozen=True)
class RunEnd:
    """End of a run, a benchmark, a sweep or a study."""

    run: str
    """Id of the run."""
    experiment: str
    """Name of the experiment."""
    status: Status
    """FINISHED, FAILED or KILLED (interrupted)."""
    result: str
    """Result in one line, as ``--quiet`` prints it; of a run without a result, the error."""
    links: Mapping[str, str]
    """Places of the results: ``folder``, and if they exist ``report`` (the page) and ``mlflow``."""

    def __str__(self) -> str:
        lines = [f"{self.experiment} {self.status}: {self.result}", *self.links.values()]
        return "\n".join(lines)

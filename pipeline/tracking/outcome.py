"""State of what has been sent of a run to MLflow, kept in the run's folder, and the places where its results are."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from pipeline.protocol.events import ArtifactSaved, ModelExported, ModelSaved
from pipeline.record import journal
from pipeline.record.folder import FolderFile
from pipeline.tracking import loggers
from pipeline.tracking.store import run_link, runs_link, ui_address
from pipeline.wording import counted

LINK_LABEL = "mlflow   "
"""Start of the line with the address of a run, see `link_of`."""
Upload = Annotated[ArtifactSaved | ModelSaved, Field(discriminator="kind")]


class TrackingOutcome(FolderFile):
    """State of the delivery of a run to MLflow. It is written after each call, so that a kill repeats one call."""

    file_name: ClassVar[str] = "sync.json"
    offset: int = 0
    """Bytes of the journal that MLflow has accepted or refused."""
    is_closed: bool = False
    """True if the last of them was the end of the run."""
    experiment_id: str = ""
    """MLflow's id of the experiment; empty if MLflow never answered."""
    run_id: str = ""
    """MLflow's id of the main run; empty if MLflow never answered."""
    delivered: bool = False
    """True if MLflow has everything that it accepts, and the run has ended."""
    uri: str = ""
    """URI of the store, without credentials, if it isn't the run's own."""
    message: str = ""
    """Missing results and the command that sends them; after a sync, the link to the run; else empty."""
    trouble: str = ""
    """Reason of the current outage; empty if there is none."""
    children: dict[str, str] = {}
    """MLflow's ids of the measurements by trial."""
    errors: dict[str, str] = {}
    """First error of each trial of this session."""
    uploads: list[Upload] = []
    """Files to upload; metrics don't wait for them."""
    models: list[ModelSaved] = []
    """Models, uploaded at the end: a measurement may follow."""
    exported: ModelExported | None = None
    """Folder of the last model as MLflow keeps it."""
    logs_model: bool = True
    is_trial: bool = False
    has_finished: bool = False
    refused: int = 0
    """Number of events that MLflow has refused for good."""
    missing: list[str] = []
    """Files that are not sent, after a warning."""

    def waiting(self, folder: Path) -> str:
        """Describe what MLflow lacks, e.g. "12 events and 3 files"; empty if nothing."""
        events = 0
        with suppress(OSError), (folder / journal.FILE_NAME).open("rb") as file:
            file.seek(self.offset)
            events = sum(1 for _ in file)
        counts = {"event": events, "file": len(self.uploads)}
        return " and ".join(counted(count, noun, spec=",") for noun, count in counts.items() if count)

    def fail(self, folder: Path, *, trouble: str = "the driver was killed", what: str = "some results") -> None:
        """Note that ``what`` is missing, and why: by default what is true if the driver is killed from now on."""
        self.delivered = False
        self.message = (
            f"not in MLflow yet: {what} ({trouble}). Nothing is lost. "
            f"Send the rest with: pipeline sync {folder}{f' --to {self.uri}' if self.uri else ''}"
        )


def link_of(uri: str, outcome: TrackingOutcome) -> str:
    """Return the line with the address of a run in the UI of its tracking store."""
    return f"{LINK_LABEL}{run_link(uri, outcome.experiment_id, outcome.run_id)}"


def places_of(folder: Path, *, is_running: bool = False) -> str:
    """Return the places of a run's results, a line each; a run that is running still sends them."""
    opened, outcome = journal.opened(folder / journal.FILE_NAME), TrackingOutcome.read(folder)
    lines = [f"run      {folder}"]
    if (folder / "report.html").exists():
        lines.append(f"report   {folder / 'report.html'}")
    if outcome and outcome.run_id:
        uri = outcome.uri or (opened.tracking_uri if opened else "")
        lines.append(link_of(uri, outcome))
        lines.append(f"all runs {runs_link(ui_address(uri), outcome.experiment_id)}")
    lines += loggers.places(folder)
    if outcome and not outcome.delivered and not is_running:
        lines.append(outcome.message)
    return "\n".join(lines)

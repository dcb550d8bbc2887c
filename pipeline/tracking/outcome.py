"""What has been sent of a run to MLflow, kept in the run's folder, and the places where its results are."""

from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError
from rich.filesize import decimal

from pipeline.protocol.events import ArtifactSaved, ModelExported, ModelSaved
from pipeline.record import journal
from pipeline.record.folder import write_atomically
from pipeline.tracking import loggers
from pipeline.tracking.store import run_link, runs_link, ui_address
from pipeline.wording import counted

_FILE_NAME = "sync.json"
_KILLED = "the driver was killed"
LINK_LABEL = "mlflow   "
"""Start of the line with the address of a run, see `link_of`."""
Upload = Annotated[ArtifactSaved | ModelSaved, Field(discriminator="kind")]


class TrackingOutcome(BaseModel):
    """State of the delivery of a run to MLflow. It is written after each call, so that a kill repeats one call."""

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

    def keep(self, folder: Path) -> None:
        """Write the state into the run's folder, for `kept`; another process may read it at any time."""
        text = self.model_dump_json(indent=1) + "\n"
        write_atomically(folder / _FILE_NAME, lambda path: path.write_text(text, encoding="utf-8"))

    @classmethod
    def kept(cls, folder: Path) -> "TrackingOutcome | None":
        """Read the state from a run's folder; None if the run isn't tracked, or nothing is known."""
        try:
            return cls.model_validate_json((folder / _FILE_NAME).read_bytes())
        except (OSError, ValidationError):
            return None

    def waiting(self, folder: Path) -> str:
        """Describe what MLflow lacks, e.g. "12 events and 3 files" or "1 file: model (2.8 MB)"; empty if nothing."""
        events, files = journal.count_lines(folder / journal.FILE_NAME, offset=self.offset), self.uploads
        counts = {"event": events, "file": len(files)}
        text = " and ".join(counted(count, noun, spec=",") for noun, count in counts.items() if count)
        if events or len(files) != 1:
            return text
        name = path = files[0].path if isinstance(files[0], ArtifactSaved) else ""
        if isinstance(files[0], ModelSaved):
            name, path = "model", str(PurePosixPath(PurePosixPath(files[0].run).name, files[0].weights))
        with suppress(OSError):
            name = f"{name} ({decimal((folder / path).stat().st_size)})"
        return f"{text}: {name}"

    def fail(self, what: str, *, folder: Path, trouble: str) -> None:
        """Note that ``what`` is missing, e.g. "12 events and 3 files", and why."""
        self.delivered = False
        self.message = (
            f"not in MLflow yet: {what or 'some results'} ({trouble}). Nothing is lost. "
            f"Send the rest with: pipeline sync {folder}{f' --to {self.uri}' if self.uri else ''}"
        )

    def mark_unfinished(self, folder: Path) -> None:
        """Note what is true if the driver is killed from now on."""
        self.fail("some results", folder=folder, trouble=_KILLED)


def link_of(uri: str, outcome: TrackingOutcome) -> str:
    """Return the line with the address of a run in the UI of its tracking store."""
    return f"{LINK_LABEL}{run_link(uri, outcome.experiment_id, outcome.run_id)}"


def places_of(folder: Path, *, is_running: bool = False) -> str:
    """Return the places of a run's results, a line each; a run that is running still sends them."""
    opened = journal.opened(folder / journal.FILE_NAME)
    outcome = TrackingOutcome.kept(folder)
    uri = (outcome.uri if outcome else "") or (opened.tracking_uri if opened else "")
    lines = [f"run      {folder}"]
    if (folder / "report.html").exists():
        lines.append(f"report   {folder / 'report.html'}")
    if outcome and outcome.run_id:
        lines.append(link_of(uri, outcome))
        lines.append(f"all runs {runs_link(ui_address(uri), outcome.experiment_id)}")
    lines += loggers.places(folder)
    if outcome and not outcome.delivered and not is_running:
        lines.append(outcome.message)
    return "\n".join(lines)

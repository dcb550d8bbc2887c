"""Outcome of delivering a run's results to MLflow, kept in the run's folder, and the places where results are."""

from pathlib import Path

from pydantic import ValidationError

from pipeline.experiment.values import Frozen
from pipeline.record import journal
from pipeline.record.folder import write_atomically
from pipeline.tracking.mlflow.store import run_link, runs_link, ui_address
from pipeline.tracking.trackers import named_trackers

_FILE_NAME = "tracking.json"
_KILLED = "the driver was killed"
LINK_LABEL = "mlflow   "
"""Start of the line with the address of a run, see `link_of`."""


class TrackingOutcome(Frozen):
    """Outcome of a delivery: MLflow's ids, and a message about missing results."""

    experiment_id: str = ""
    """MLflow's id of the experiment; empty if MLflow never answered."""
    run_id: str = ""
    """MLflow's id of the main run; empty if MLflow never answered."""
    delivered: bool
    """True if MLflow has everything that it accepts."""
    uri: str = ""
    """URI of the store, without credentials, if it isn't the run's own."""
    message: str = ""
    """Missing results and the command that sends them; after a sync, the link to the run; else empty."""
    waiting: str = ""
    """Missing results, e.g. "12 events and 3 files" or "1 file: model (2.8 MB)"; empty if there are none."""
    late: tuple[str, ...] = ()
    """Loggers that don't have everything yet while the end of a run waits for them, MLflow among them."""

    def keep(self, folder: Path) -> None:
        """Write the outcome into the run's folder, for `kept`; another process may read it at any time."""
        text = self.model_dump_json(indent=1) + "\n"
        write_atomically(folder / _FILE_NAME, lambda path: path.write_text(text, encoding="utf-8"))

    @classmethod
    def kept(cls, folder: Path) -> "TrackingOutcome | None":
        """Read the last outcome from a run's folder; None if the run isn't tracked, or MLflow doesn't have it."""
        try:
            return cls.model_validate_json((folder / _FILE_NAME).read_bytes())
        except (OSError, ValidationError):
            return None

    def lacking(self, what: str, *, folder: Path, trouble: str) -> "TrackingOutcome":
        """Return a copy for a delivery that is incomplete.

        Args:
            what: missing results, e.g. "12 events and 3 files".
            folder: the run's folder.
            trouble: why they are missing.
        """
        message = (
            f"not in MLflow yet: {what} ({trouble}). Nothing is lost. "
            f"Send the rest with: pipeline sync {folder}{f' --to {self.uri}' if self.uri else ''}"
        )
        return self.model_copy(update={"delivered": False, "message": message, "waiting": what})

    def mark_unfinished(self, folder: Path) -> "TrackingOutcome":
        """Return a copy to keep during a run, in case its driver is killed."""
        return self.lacking("some results", folder=folder, trouble=_KILLED)

    @property
    def is_unfinished(self) -> bool:
        """True if the outcome is from the time before the run ended."""
        return f"({_KILLED})" in self.message


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
    lines += named_trackers.places(folder)
    if outcome and not outcome.delivered and not is_running:
        lines.append(outcome.message)
    return "\n".join(lines)

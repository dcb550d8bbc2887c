"""Outcome of delivering a run's results to MLflow, kept in the run's folder, and the places where results are."""

from pathlib import Path

from pydantic import ValidationError

from pipeline.config.values import Frozen
from pipeline.recording import also, journal
from pipeline.recording.delivery import Delivery
from pipeline.recording.journal import FILE_NAME
from pipeline.recording.store import run_link, runs_link, ui_address
from pipeline.wording import counted

_FILE_NAME = "tracking.json"


class TrackingOutcome(Frozen):
    """Outcome of a delivery: MLflow's ids, and a message about missing results."""

    experiment_id: str = ""
    """MLflow's id of the experiment; empty if MLflow never answered."""
    run_id: str = ""
    """MLflow's id of the main run; empty if MLflow never answered."""
    trials_view: str = ""
    """Name of the saved view of a sweep's trials; empty for other runs."""
    delivered: bool
    """True if MLflow has everything that it accepts."""
    uri: str = ""
    """URI of the store, without credentials, if it isn't the run's own."""
    message: str = ""
    """Missing results and the command that sends them; after a sync, the link to the run; else empty."""

    def keep(self, folder: Path) -> None:
        """Write the outcome into the run's folder, for `kept`."""
        (folder / _FILE_NAME).write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")

    @classmethod
    def kept(cls, folder: Path) -> "TrackingOutcome | None":
        """Read the last outcome from a run's folder; None if the run isn't tracked, or MLflow doesn't have it."""
        try:
            return cls.model_validate_json((folder / _FILE_NAME).read_bytes())
        except (OSError, ValidationError):
            return None

    @classmethod
    def of(cls, delivery: Delivery, *, trouble: str, waiting: int, uri: str = "") -> "TrackingOutcome":
        """Return the outcome of a delivery.

        Args:
            delivery: the delivery of the run's events.
            trouble: why events or files aren't in MLflow; empty if all are.
            waiting: number of events that aren't in MLflow.
            uri: URI of the store, without credentials, unless it is the run's own.
        """
        run, folder = delivery.run, delivery.run.folder
        ids = {"experiment_id": run.experiment_id, "run_id": run.run_id, "trials_view": run.trials_view}
        known = cls(**ids, delivered=True, uri=uri)
        if trouble:
            return known.lacking(delivery.waiting(waiting) or "some results", folder=folder, trouble=trouble)
        if not delivery.refused:
            return known
        message = f"MLflow rejected {counted(delivery.refused, 'event')}, kept in {folder / FILE_NAME}"
        return known.model_copy(update={"message": message})

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
        return self.model_copy(update={"delivered": False, "message": message})


def link_of(uri: str, outcome: TrackingOutcome) -> str:
    """Return the line with the address of a run in the UI of its tracking store."""
    return f"mlflow   {run_link(uri, outcome.experiment_id, outcome.run_id)}"


def where_to_look(folder: Path, uri: str, outcome: TrackingOutcome | None) -> str:
    """Return the places of a run's results, a line each.

    Args:
        folder: the run's folder.
        uri: URI of its tracking store.
        outcome: delivery of its results there; None if they weren't sent.
    """
    lines = [f"run      {folder}"]
    if (folder / "report.html").exists():
        lines.append(f"report   {folder / 'report.html'}")
    if outcome and outcome.run_id:
        lines.append(link_of(uri, outcome))
        address = ui_address(uri)
        if outcome.trials_view:
            lines.append(f"trials   {runs_link(address, outcome.experiment_id, view=outcome.trials_view)}")
        lines.append(f"all runs {runs_link(address, outcome.experiment_id)}")
    lines += also.places(folder)
    if outcome and not outcome.delivered:
        lines.append(outcome.message)
    return "\n".join(lines)


def places_of(folder: Path, *, is_running: bool = False) -> str:
    """Return the places of the results of a run, which still sends them if it is running; see `where_to_look`."""
    opened = journal.opened(folder / journal.FILE_NAME)
    own = opened.tracking_uri if opened else ""
    outcome = TrackingOutcome.kept(folder)
    if outcome and is_running:
        outcome = outcome.model_copy(update={"delivered": True})
    return where_to_look(folder, outcome.uri if outcome and outcome.uri else own, outcome)

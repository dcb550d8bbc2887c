"""Outcome of delivering a run's results to MLflow, kept in the run's folder."""

from pathlib import Path

from pydantic import ValidationError

from pipeline.config.values import Frozen
from pipeline.recording.delivery import Delivery
from pipeline.recording.journal import FILE_NAME

_FILE_NAME = "tracking.json"


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

    def keep(self, folder: Path) -> None:
        """Write the outcome into the run's folder, for `kept`."""
        (folder / _FILE_NAME).write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")

    @classmethod
    def kept(cls, folder: Path) -> "TrackingOutcome | None":
        """Read the last outcome from a run's folder; None if the run wasn't tracked, or was killed."""
        try:
            return cls.model_validate_json((folder / _FILE_NAME).read_bytes())
        except (OSError, ValidationError):
            return None

    @classmethod
    def of(cls, delivery: Delivery, *, folder: Path, trouble: str, waiting: int, uri: str = "") -> "TrackingOutcome":
        """Return the outcome of a delivery.

        Args:
            delivery: the delivery of the run's events.
            folder: the run's folder.
            trouble: why events or files aren't in MLflow; empty if all are.
            waiting: number of events that aren't in MLflow.
            uri: URI of the store, without credentials, unless it is the run's own.
        """
        files = len(delivery.run.uploads)
        parts = [f"{waiting} events"] * bool(waiting) + [f"{files} files"] * bool(files)
        known = cls(experiment_id=delivery.run.experiment_id, run_id=delivery.run.run_id, delivered=True, uri=uri)
        if trouble:
            return known.lacking(" and ".join(parts) or "some results", folder=folder, trouble=trouble)
        if not delivery.refused:
            return known
        message = f"MLflow refused {delivery.refused} events; they are in {folder / FILE_NAME}"
        return known.model_copy(update={"message": message})

    def lacking(self, what: str, *, folder: Path, trouble: str) -> "TrackingOutcome":
        """Return a copy for a delivery that is incomplete.

        Args:
            what: missing results, e.g. "12 events".
            folder: the run's folder.
            trouble: why they are missing.
        """
        message = (
            f"{what} aren't in MLflow ({trouble}); they are in {folder / FILE_NAME}, "
            f"send them with: pipeline sync {folder}{f' --to {self.uri}' if self.uri else ''}"
        )
        return self.model_copy(update={"delivered": False, "message": message})
